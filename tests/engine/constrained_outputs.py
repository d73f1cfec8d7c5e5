"""Constrained requests for an engine with random numbers in place of a model, and their answers."""

from __future__ import annotations

import functools
import re

import jsonschema
import msgspec
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import InlineCompiler
from world import make_request

from tureen.contract.runner import Capacity
from tureen.engine.engine import Engine
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
PATTERNS = [
    "(ab|a)(c|bcd)*d?",
    r"\d{3}-[^\W\d]{2,5}",
    "(?i:yes|no)[.!]?",
    "(a+b){2,}c{0,3}",
    "[é-ü]{2}|🙂+",
    "(x|xy|xyz){3}",
]
compiler = functools.cache(InlineCompiler)


def make_engine(*, token_budget=64, num_pages=600, context_len=3000, choose=None):
    runner = FakeRunner(Capacity(num_pages, 8, 8, VOCAB_SIZE, context_len), choose=choose)
    tokenizer = make_byte_tokenizer()
    return Engine(runner, tokenizer, eos_token_ids=(EOS,), token_budget=token_budget, compiler=compiler())


def run(engine, *requests):
    """Return each request's text, tokens and finish."""
    answers = {request.id: ["", (), None] for request in requests}
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


def limited(request_id, kind, text, most, *, seed=0, field="max_new_tokens", **params):
    request = constrained(request_id, kind, text, seed=seed, max_new_tokens=most, **params)
    return msgspec.structs.replace(request, limit_field=field)


def least_of(kind, text):
    """Return the minimum max_new_tokens that the server names when it rejects 1, or 1 if it accepts 1."""
    [answer] = run(make_engine(), limited("a", kind, text, 1)).values()
    if answer[2].type != "error":
        return 1
    assert (answer[2].status, answer[2].code, answer[2].field) == (400, "max_new_tokens_too_small", "max_new_tokens")
    assert answer[1] == ()
    return int(re.search(r"takes (\d+) tokens", answer[2].message)[1])


def random_schema(rng, depth=0):
    """Return a schema of bounded size whose values are short."""
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
