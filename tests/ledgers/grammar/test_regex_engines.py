"""Our verdicts on patterns, compared with those of Node's regular expressions."""

import json
import random
import subprocess
import sys
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
from real_schemas import corpus
from regexes import changes, drawn, patterns_in

from tureen.grammar import regex, regular
from tureen.grammar.expression import SchemaError
from tureen.grammar.schema.formats import in_format

GUARDS = ("grammar",)
NODE = compute_driver_executable()[0]  # that of the development environment, for browsers
SCRIPT = """
const refuses = (pattern, flags) => { try { new RegExp(pattern, flags); return false } catch { return true } };
const patterns = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(patterns.map((pattern) => [refuses(pattern, "u"), refuses(pattern, "")])));
"""


def refusals(patterns):
    """Return for each pattern whether the engine rejects it with the flag u, and without."""
    text = json.dumps(patterns)
    answer = subprocess.run([NODE, "-e", SCRIPT], input=text, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(answer.stdout)


def test_a_javascript_engine_reads_random_regexes_and_changed_ones():
    rng, machine = random.Random("node"), regular.automaton(in_format("regex"))
    texts = [drawn(in_format("regex"), rng) for _ in range(2_000)]
    texts += [other for text in texts for other in changes(text, rng) if regular.accepts(machine, other)]
    assert len(texts) > 3_000
    assert [text for text, (with_u, _) in zip(texts, refusals(texts), strict=True) if with_u] == []


def test_what_is_malformed_is_so_to_a_javascript_engine():
    rng = random.Random("malformed")
    patterns = sorted({pattern for text in corpus().values() for pattern in patterns_in(json.loads(text))})
    patterns = [other for pattern in patterns for other in changes(pattern, rng)]
    malformed = list(filter(is_malformed, patterns))
    assert len(malformed) > 400
    assert [text for text, refused in zip(malformed, refusals(malformed), strict=True) if refused != [True, True]] == []


def is_malformed(pattern):
    try:
        regex.check_form(pattern, flavour="ecma")
    except SchemaError:
        return True
    return False
