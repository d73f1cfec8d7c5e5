"""Constraints with the default model's tokenizer: forced and drawn tokens together form the text."""

import json
import random
from functools import partial

import numpy as np
import pytest
from llguidance_masks.llguidance import Llguidance

from tureen.build import vocabulary_of
from tureen.grammar import LanguageCompiler
from tureen.grammar.base import GrammarSpec
from tureen.grammar.frontends import language_of
from tureen.kernels.cpu import native
from tureen.weights.source import load_tokenizer

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Paris", "London", "Zürich"]},
        "email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{2,8}[.]com$"},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "email", "active"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "literal": GrammarSpec("regex", "The answer is (forty-two|unknown), as everybody knows[.] Good bye!"),
}


@pytest.fixture(scope="module")
def tokenizer(default_model_source):
    return load_tokenizer(default_model_source)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return vocabulary_of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size, "auto")


@pytest.fixture(scope="module")
def compiler(tokenizer, vocabulary):
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return LanguageCompiler(vocabulary, encode, native.require())


def generated(grammar, vocabulary, source):
    """An output, its tokens forced or drawn from the masks, and how many were drawn."""
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
    tokens, drawn = [], 0
    while not grammar.is_done:
        ahead = grammar.forced()
        for token_id in ahead:
            grammar.fill_mask(mask)
            assert mask[token_id // 32] >> (token_id % 32) & 1
            assert grammar.accept(token_id)
        tokens += ahead
        if grammar.is_done:
            break
        grammar.fill_mask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        token_id = int(source.choice([i for i in allowed.tolist() if i not in vocabulary.eos_token_ids]))
        assert grammar.accept(token_id)
        tokens.append(token_id)
        drawn += 1
    return tokens, drawn


def test_a_generated_object_fits_its_schema_and_takes_fewer_steps_than_tokens(compiler, vocabulary, tokenizer):
    language = language_of(SPECS["schema"])
    tokens, steps = generated(compiler.load(compiler.translate(language)).start(), vocabulary, random.Random(0))
    text = b"".join(vocabulary.tokens[token_id] for token_id in tokens).decode()
    assert tokenizer.decode(tokens) == text
    value = json.loads(text)
    assert json.dumps(value, ensure_ascii=False) == text
    assert list(value) == SCHEMA["required"]
    assert value["city"] in SCHEMA["properties"]["city"]["enum"]
    assert len(value["name"]) <= 12
    assert steps < len(tokens)


def test_a_fixed_text_is_forced_as_the_tokenizer_writes_it(compiler, tokenizer):
    grammar = compiler.load(compiler.translate(language_of(SPECS["literal"]))).start()
    start = grammar.forced()
    assert tokenizer.decode(start) == "The answer is"  # a space could belong to the next token
    assert start == tokenizer.encode("The answer is", add_special_tokens=False)
    for token_id in tokenizer.encode("The answer is forty-two", add_special_tokens=False):
        assert grammar.accept(token_id)
    end = grammar.forced()
    assert end == tokenizer.encode(", as everybody knows. Good bye!", add_special_tokens=False)
    assert all(map(grammar.accept, end))
    assert grammar.is_done


def test_masks_are_those_of_llguidance(vocabulary, tokenizer, compiler):
    language = language_of(SPECS["schema"])
    oracle = Llguidance(vocabulary, lambda text: [])
    grammars = [each.load(each.translate(language)).start() for each in (compiler, oracle)]
    masks = np.zeros((2, -(-vocabulary.size // 32)), dtype=np.uint32)
    text = '{"name": "Ann \\"é\\n", "age": 42, "city": "Zürich", "email": "a@bc.com", "active": true}'
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.fill_mask(mask)
            assert grammar.accept(token_id)
        assert (masks[1] == masks[0]).all(), np.unpackbits((masks[1] ^ masks[0]).view(np.uint8)).sum()
    assert all(grammar.is_done for grammar in grammars)
