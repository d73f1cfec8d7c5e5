"""Engine, real grammars and random numbers in place of a model: whatever is drawn, what ends with `stop` matches."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import msgspec
import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import InlineCompiler
from world import make_request

from tureen.contract.runner import Capacity
from tureen.contract.types import LogprobSpec
from tureen.engine.engine import Engine
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def make_engine(backend, token_budget=64, num_pages=600):
    runner = FakeRunner(Capacity(num_pages, 8, 8, VOCAB_SIZE, 3000))
    compiler = InlineCompiler(backend)
    return Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=token_budget, compiler=compiler)


def run(engine, requests):
    """Of each request its text, tokens and finish."""
    answers = {request.id: ["", [], None] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        for delta in engine.step():
            answer = answers[delta.id]
            answer[0] += delta.text
            answer[1] += delta.token_ids
            answer[2] = delta.finish
    return answers


def constrained(request_id, kind, text, *, seed=0, max_new_tokens=400, logprobs=None, **params):
    request = make_request(request_id, (1, 2, seed % 200), max_new_tokens=max_new_tokens, seed=seed, **params)
    return msgspec.structs.replace(request, grammar=GrammarSpec(kind, text), grammar_field=kind, logprobs=logprobs)


def test_text_comes_no_earlier_than_its_tokens_and_neither_after_an_abort():
    engine = make_engine("llguidance", token_budget=4)
    engine.add(constrained("a", "choice", '["abcdefghijklmnopqrstuvwxyz"]', logprobs=LogprobSpec()))
    engine.prepare()
    deltas = [delta for _ in range(4) for delta in engine.step()]
    engine.abort("a")
    deltas += engine.step()
    for delta in deltas:
        assert delta.text == bytes(delta.token_ids).decode()
        assert len(delta.output_logprobs) == len(delta.token_ids)
    assert "".join(delta.text for delta in deltas) == "abcdefghijklmn"
    assert (deltas[-1].finish.type, deltas[-1].usage.output_tokens, deltas[-1].usage.forced_tokens) == ("abort", 14, 14)


def random_schema(rng, depth=0):
    """A schema of bounded size whose values are short."""
    leaves = [
        lambda: {"type": "integer", "minimum": rng.randrange(-50, 0), "maximum": rng.randrange(200)},
        lambda: {"type": "number", "exclusiveMinimum": rng.randrange(-9, 0), "maximum": rng.randrange(1, 9)},
        lambda: {"type": "string", "maxLength": rng.randrange(6)},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d+-x$", '^(ab|"é)*$']), "maxLength": 12},
        lambda: {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
        lambda: {"enum": rng.sample(["a", "ab", 1, 2.5, None, True, [1], {"k": []}, "\n\u0001é"], 3)},
        lambda: {"const": rng.choice([0, 'x"y', None, {"a": 1}])},
        lambda: {"type": rng.sample(["null", "boolean", "integer"], 2)},
    ]
    if depth > 2 or rng.random() < 0.3:
        return rng.choice(leaves)()
    names = rng.sample(["a", "b", "long name", "é", 'x"y'], rng.randrange(1, 4))
    nested = [
        lambda: {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
            "additionalProperties": rng.choice([False, False, {"type": "boolean"}]),
            "maxProperties": 4,
        },
        lambda: {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randrange(2),
            "maxItems": rng.randrange(2, 4),
        },
        lambda: {"type": "array", "prefixItems": [random_schema(rng, depth + 1) for _ in range(2)], "items": False},
        lambda: {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]},
        lambda: (
            {
                "$defs": {"node": random_schema(rng, depth + 1)},
                "type": "array",
                "items": {"$ref": "#/$defs/node"},
                "maxItems": 2,
            }
            if depth == 0
            else {"type": "boolean"}
        ),
    ]
    return rng.choice(nested)()


def check_json(schema, answer):
    text, _, finish = answer
    assert finish.type in ("stop", "length"), (schema, finish)
    if finish.type == "stop":
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


def test_random_numbers_under_random_schemas_always_make_valid_json():
    rng = random.Random(4)
    engine = make_engine("llguidance")
    schemas = {str(index): random_schema(rng) for index in range(120)}
    requests = [
        constrained(
            name,
            "json_schema",
            json.dumps(schema),
            seed=index,
            temperature=rng.choice([0.0, 1.0]),
            logprobs=LogprobSpec() if index % 5 == 0 else None,
        )
        for index, (name, schema) in enumerate(schemas.items())
    ]
    answers = run(engine, requests)
    for name, schema in schemas.items():
        check_json(schema, answers[name])
    assert sum(answer[2].type == "stop" for answer in answers.values()) > 100
    assert engine.stats().total_forced_tokens > 500


PATTERNS = [
    "(ab|a)(c|bcd)*d?",
    r"\d{3}-[^\W\d]{2,5}",
    "(?i:yes|no)[.!]?",
    "(a+b){2,}c{0,3}",
    "[é-ü]{2}|🙂+",
    "(x|xy|xyz){3}",
]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
def test_random_numbers_under_patterns_always_make_matches(backend):
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    engine = make_engine(backend)
    requests = [
        constrained(f"{seed} {pattern}", "regex", pattern, seed=seed, max_new_tokens=60)
        for pattern in PATTERNS
        for seed in range(8)
    ]
    answers = run(engine, requests)
    for request in requests:
        text, _, finish = answers[request.id]
        assert finish.type in ("stop", "length")
        assert finish.type == "length" or re.fullmatch(request.grammar.text, text), (request.grammar.text, text)
    assert sum(answer[2].type == "stop" for answer in answers.values()) > len(answers) // 2


def test_a_constrained_output_is_the_same_alone_among_others_in_small_pieces_and_preempted():
    rng = random.Random(9)
    requests = [
        constrained(
            str(index),
            "json_schema",
            json.dumps(random_schema(rng)),
            seed=index,
            max_new_tokens=120,
            logprobs=LogprobSpec() if index % 2 else None,
        )
        for index in range(24)
    ]
    alone = {}
    for request in requests:
        alone |= run(make_engine("llguidance"), [request])
    assert run(make_engine("llguidance"), requests) == alone
    assert run(make_engine("llguidance", token_budget=3), requests) == alone
    squeezed = make_engine("llguidance", num_pages=24)
    assert run(squeezed, requests) == alone
    assert squeezed.stats().total_preemptions > 0
