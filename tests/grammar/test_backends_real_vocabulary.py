"""The backends with the default model's tokenizer: what is forced and what is drawn make one text."""

import json
import random

import numpy as np
import pytest

from tureen.grammar.backends.registry import BACKENDS, find_backend
from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.frontends import language_of
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
    special = tokenizer.special_ids
    tokens = tuple(b"" if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return Vocabulary(tokens, tokenizer.eos_token_ids, tokenizer.vocab_size)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request, tokenizer, vocabulary):
    pytest.importorskip({"outlines": "outlines_core"}.get(request.param, request.param))
    return find_backend(request.param)(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False))


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


def test_a_generated_object_fits_its_schema_and_takes_fewer_steps_than_tokens(backend, vocabulary, tokenizer):
    language = language_of(SPECS["schema"])
    tokens, steps = generated(backend.load(backend.translate(language)).start(), vocabulary, random.Random(0))
    text = b"".join(vocabulary.tokens[token_id] for token_id in tokens).decode()
    assert tokenizer.decode(tokens) == text
    value = json.loads(text)
    assert json.dumps(value, ensure_ascii=False) == text
    assert list(value) == SCHEMA["required"]
    assert value["city"] in SCHEMA["properties"]["city"]["enum"]
    assert len(value["name"]) <= 12
    assert steps < len(tokens)


def test_a_fixed_text_is_forced_as_the_tokenizer_writes_it(backend, tokenizer):
    grammar = backend.load(backend.translate(language_of(SPECS["literal"]))).start()
    start = grammar.forced()
    assert tokenizer.decode(start) == "The answer is"  # a space could belong to the next token
    assert start == tokenizer.encode("The answer is", add_special_tokens=False)
    for token_id in tokenizer.encode("The answer is forty-two", add_special_tokens=False):
        assert grammar.accept(token_id)
    end = grammar.forced()
    assert end == tokenizer.encode(", as everybody knows. Good bye!", add_special_tokens=False)
    assert all(map(grammar.accept, end))
    assert grammar.is_done


def test_the_masks_of_all_backends_are_the_same(vocabulary, tokenizer):
    for name in BACKENDS:
        pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    language = language_of(SPECS["schema"])
    grammars = []
    for name in BACKENDS:
        backend = find_backend(name)(vocabulary, encode)
        grammars.append(backend.load(backend.translate(language)).start())
    masks = np.zeros((len(grammars), -(-vocabulary.size // 32)), dtype=np.uint32)
    text = '{"name": "Ann \\"é\\n", "age": 42, "city": "Zürich", "email": "a@bc.com", "active": true}'
    for token_id in encode(text):
        for grammar, mask in zip(grammars, masks, strict=True):
            grammar.fill_mask(mask)
            assert grammar.accept(token_id)
        assert (masks == masks[0]).all(), np.unpackbits((masks ^ masks[0]).view(np.uint8)).sum()
    assert all(grammar.is_done for grammar in grammars)
