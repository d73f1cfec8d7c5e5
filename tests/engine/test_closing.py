"""Constrained outputs come to an end within their limit, whatever is drawn; else they are refused before they run."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import msgspec
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import EOS, InlineCompiler
from test_constrained_outputs import FORMATS, constrained, random_schema

from tureen.contract.runner import Capacity
from tureen.engine.engine import Engine
from tureen.runner.fake import FakeRunner

COMPILER = InlineCompiler()


def make_engine(*, token_budget=64, num_pages=600, context_len=3000, choose=None):
    runner = FakeRunner(Capacity(num_pages, 8, 8, VOCAB_SIZE, context_len), choose=choose)
    return Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=token_budget, compiler=COMPILER)


def run(engine, *requests):
    """Of each request its text, tokens and finish."""
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


def limited(request_id, kind, text, most, *, seed=0, field="max_new_tokens", **params):
    request = constrained(request_id, kind, text, seed=seed, max_new_tokens=most, **params)
    return msgspec.structs.replace(request, limit_field=field)


def least_of(kind, text):
    """What the refusal of a limit of one token names; 1 where it is not refused."""
    [answer] = run(make_engine(), limited("a", kind, text, 1)).values()
    if answer[2].type != "error":
        return 1
    assert (answer[2].status, answer[2].code, answer[2].field) == (400, "max_new_tokens_too_small", "max_new_tokens")
    assert answer[1] == ()
    return int(re.search(r"takes (\d+) tokens", answer[2].message)[1])


def check(schema, answer, most):
    text, token_ids, finish = answer
    assert finish.type == "stop", (schema, most, answer)
    assert len(token_ids) <= most
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


def test_random_numbers_under_random_schemas_and_random_limits_always_make_valid_json():
    dice = random.Random(17)
    cases = []
    for index in range(150):
        schema = random_schema(dice)
        text = json.dumps(schema)
        least = least_of("json_schema", text)
        most = least + dice.choice([0, 0, 1, 2, 5, 20, 60])
        request = limited(str(index), "json_schema", text, most, seed=index, temperature=dice.choice([0.0, 1.0]))
        cases.append((request, schema, most))
    answers = run(make_engine(num_pages=100), *(request for request, _, _ in cases))
    for request, schema, most in cases:
        check(schema, answers[request.id], most)
    assert sum(answer[2].closed_early for answer in answers.values()) > 50
