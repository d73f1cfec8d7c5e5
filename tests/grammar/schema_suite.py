"""The JSON Schema Test Suite, and what becomes of each case: it is right or refused, none is wrongly accepted.

`json_schema_ledger.json` names what is not right; what is refused, with the keyword. It may only get shorter: a case
that got better must be taken out of it. `python tests/grammar/schema_suite.py` rewrites it, unless a file got
worse. test_schema_suite_sample.py looks at some files, tests/ledgers/grammar/test_schema_suite.py at all.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import tarfile
from collections import Counter
from decimal import Decimal
from functools import cache, partial
from pathlib import Path

from matching import matches

from tureen.grammar import LanguageCompiler, Vocabulary
from tureen.grammar.expression import GrammarError
from tureen.grammar.guard.guarded import load_guarded
from tureen.grammar.schema.language import json_schema
from tureen.kernels.cpu import native

HERE = Path(__file__).parent
LEDGER = HERE / "json_schema_ledger.json"
SUITE = HERE / "json-schema-test-suite.tar.xz"
MAX_TEXTS = 150
NO_VALUE = "no JSON value is valid"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""The drafts whose cases do not say themselves what they are written in."""
ELSEWHERE = ("format", "content", "vocabulary", "refRemote", "defs", "definitions", "dynamicRef")
"""Not about objects, arrays, strings, numbers and combinators: other documents and annotations."""


@cache
def suite():
    """File name ("draft7/not.json") to its groups."""
    found = {}
    with tarfile.open(SUITE) as archive:
        for member in archive:
            if member.name.endswith(".json"):
                text = io.TextIOWrapper(archive.extractfile(member), encoding="utf-8").read()
                found[member.name] = json.loads(text, parse_float=Decimal)
    return dict(sorted(found.items()))


def texts(value, schema):
    """The value in the one layout, its keys in any order (the schema's first), its numbers in any plain form."""
    if isinstance(value, list):
        for items in itertools.product(*(list(texts(item, schema)) for item in value)):
            yield "[" + ", ".join(items) + "]"
    elif isinstance(value, dict):
        for order in itertools.permutations(sorted(value, key=lambda key: schema.find(dumps(key)) % len(schema))):
            for items in itertools.product(*(list(texts(value[key], schema)) for key in order)):
                members = (f"{dumps(key)}: {item}" for key, item in zip(order, items, strict=True))
                yield "{" + ", ".join(members) + "}"
    elif isinstance(value, Decimal):
        yield from dict.fromkeys((str(value), f"{value:f}", f"{value.normalize():f}"))
    else:
        yield dumps(value)


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    """The schema as it is written, for `json_schema`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


@cache
def compiler():
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)), (256,), 257)
    return LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())


def guarded_matcher(language):
    """Whether a text is in a language with a guard, as a function."""
    compiled = load_guarded(compiler().translate(language), language.guard, compiler())

    def accepts(text):
        place = compiled.start()
        return all(map(place.accept, text.encode())) and place.is_accepting

    return accepts


@cache
def results(name, *, leaves_out=False, strict=True):
    """Of a file: case (group, description) to what became of it, and to why."""
    found, draft = {}, DRAFTS.get(name.partition("/")[0])
    for group in suite()[name]:
        schema = group["schema"]
        if draft is not None and isinstance(schema, dict):
            schema = {"$schema": draft} | schema
        text = plain(schema)
        try:
            language, reason = json_schema(text, leaves_out=leaves_out, strict=strict, guards=True), ""
            accepts = partial(matches, language) if language.guard is None else guarded_matcher(language)
        except GrammarError as error:
            language, reason, accepts = None, str(error), None
        for case in group["tests"]:
            found[group["description"], case["description"]] = outcome(language, accepts, reason, case, text), reason
    return found


def outcome(language, accepts, reason, case, schema):
    if language is None:
        if NO_VALUE in reason:
            return "wrongly refused" if case["valid"] else "right"
        return "refused"
    written = list(itertools.islice(texts(case["data"], schema), MAX_TEXTS))
    is_accepted = any(map(accepts, written))
    if language.unenforced and is_accepted >= case["valid"]:
        return "not enforced"
    if is_accepted == case["valid"]:
        return "right"
    return "wrongly accepted" if is_accepted else "wrongly refused"


def entry(name):
    """What the ledger says about a file."""
    found = results(name)
    counts = Counter(what for what, _ in found.values())
    refused, wrong, impossible = {}, {}, []
    for (group, case), (what, reason) in found.items():
        if what == "refused":
            refused[group] = re.search(r'"(\$?\w+)"', reason)[1]
        elif what != "right":
            wrong.setdefault(group, []).append(f"{what}: {case}")
        if NO_VALUE in reason and group not in impossible:
            impossible.append(group)
    lists = {"refused": refused, "not right": wrong, "right as nothing is valid against it": impossible}
    told = {"cases": counts.total(), "right": counts["right"]}
    narrow = sum(what == "right" for what, _ in results(name, leaves_out=True).values())
    if narrow < counts["right"]:
        told["right without keys that the schema does not speak of"] = narrow
    if counts["refused"]:
        told["without strict"] = dict(sorted(without_strict(name).items()))
    return told | {key: value for key, value in lists.items() if value}


@cache
def without_strict(name):
    """What becomes of the cases that strict refuses, where it is not asked for."""
    strict, kinder = results(name), results(name, strict=False)
    return Counter(what for case, (what, _) in kinder.items() if strict[case][0] == "refused")


def wrongly_accepted(name):
    """Return the cases of a file whose value is not valid and is accepted all the same."""
    found = [results(name), results(name, leaves_out=True), results(name, strict=False)]
    return [case for some in found for case, (what, _) in some.items() if what == "wrongly accepted"]


def changed_without_strict(name):
    """Return the cases of a file that differ without strict, and that strict does not refuse."""
    strict, kinder = results(name), results(name, strict=False)
    kept = ("not enforced", "refused")
    return [
        case
        for case, (what, _) in kinder.items()
        if (what not in kept if strict[case][0] == "refused" else what != strict[case][0])
    ]


def ledger():
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {}


def main():
    before, after = ledger(), {name: entry(name) for name in suite()}
    worse = [
        name
        for name, now in after.items()
        if any(what == "wrongly accepted" for what, _ in results(name).values())
        or (name in before and now["right"] < before[name]["right"])
    ]
    for name in worse:
        print(f"worse: {name}: {before.get(name, {}).get('right')} were right, now {after[name]}")
    if not worse:
        LEDGER.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{sum(entry['right'] for entry in after.values())} of {sum(entry['cases'] for entry in after.values())}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
