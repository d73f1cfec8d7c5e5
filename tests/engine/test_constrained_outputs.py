"""Engine, real grammars and random numbers in place of a model: whatever is drawn, what ends with `stop` matches."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from constrained_outputs import FORMATS, PATTERNS, constrained, make_engine, random_schema, run
from samples import either

from tureen.contract.types import LogprobSpec


def test_text_comes_no_earlier_than_its_tokens_and_neither_after_an_abort():
    engine = make_engine(token_budget=4)
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


def check_json(schema, answer):
    text, _, finish = answer
    assert finish.type in ("stop", "length"), (schema, finish)
    if finish.type == "stop":
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.sampled
def test_random_numbers_under_random_schemas_always_make_valid_json():
    rng = random.Random(4)
    engine = make_engine()
    schemas = {str(index): random_schema(rng) for index in range(either(120, 40))}
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
    answers = run(engine, *requests)
    for name, schema in schemas.items():
        check_json(schema, answers[name])
    assert sum(answer[2].type == "stop" for answer in answers.values()) > 0.8 * len(answers)
    assert engine.stats().total_forced_tokens > 4 * len(answers)


@pytest.mark.sampled
def test_random_numbers_under_patterns_always_make_matches():
    engine = make_engine()
    requests = [
        constrained(f"{seed} {pattern}", "regex", pattern, seed=seed, max_new_tokens=60)
        for pattern in PATTERNS
        for seed in range(either(8, 3))
    ]
    answers = run(engine, *requests)
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
        alone |= run(make_engine(), request)
    assert run(make_engine(), *requests) == alone
    assert run(make_engine(token_budget=3), *requests) == alone
    squeezed = make_engine(num_pages=24)
    assert run(squeezed, *requests) == alone
    assert squeezed.stats().total_preemptions > 0
