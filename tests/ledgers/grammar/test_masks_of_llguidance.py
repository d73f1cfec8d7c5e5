"""Masks are llguidance's, bit for bit: of real schemas with a real vocabulary, of random languages, of tools' tags."""

import contextlib
import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "grammar"))
from closing_places import follow_both
from llguidance_masks.llguidance import Llguidance
from random_languages import random_language
from real_schemas import corpus

from tureen.build import vocabulary_of
from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, language_of
from tureen.kernels.cpu import native
from tureen.text.messages import Tool, ToolChoice
from tureen.text.tools import PARSERS, constraint
from tureen.weights.source import load_tokenizer

GUARDS = ("grammar", "kernels")

EVERY = 10
PARTS = 12
SCHEMA = {"type": "object", "properties": {"t": {"type": "string"}, "n": {"type": "integer"}}, "required": ["t"]}


@pytest.fixture(scope="module")
def engines(default_model_source):
    tokenizer = load_tokenizer(default_model_source)
    vocabulary = vocabulary_of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size, "auto")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return {
        "engine": LanguageCompiler(vocabulary, encode, native.require()),
        "oracle": Llguidance(vocabulary, lambda text: []),
    }


@pytest.mark.model
@pytest.mark.parametrize("part", range(PARTS))
def test_masks_of_real_schemas_with_a_real_vocabulary_are_those_of_llguidance(part, engines):
    num_masks = 0
    for name in sorted(corpus())[part * EVERY :: EVERY * PARTS]:
        try:
            language = language_of(GrammarSpec("json_schema", corpus()[name]))
        except GrammarError:
            continue
        for number in range(2):
            num_masks += follow_both(language, random.Random(f"{name} {number}"), **engines)
    assert num_masks > 500


@pytest.mark.parametrize("part", range(20))
def test_masks_of_random_languages_are_those_of_llguidance(part):
    num_masks = 0
    for seed in range(100 * part, 100 * part + 100):
        dice = random.Random(seed)
        with contextlib.suppress(GrammarError):  # no text fits some of them
            num_masks += follow_both(random_language(dice, has_rules=bool(seed % 2)), dice)
    assert num_masks > 200


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_masks_of_tags_are_those_of_llguidance(name):
    num_masks = 0
    for strict in (True, False):
        tools = (Tool(name="a", parameters=SCHEMA, strict=strict), Tool(name="b", parameters=SCHEMA, strict=True))
        for mode in ("auto", "required"):
            tag = json.dumps(constraint(PARSERS[name], tools, ToolChoice(mode), parallel=True))
            language = language_of(GrammarSpec("structural_tag", tag))
            for seed in range(3):
                num_masks += follow_both(language, random.Random(f"{name} {mode} {seed}"), 60)
    assert num_masks > 200
