"""Answers to schemas that no grammar can enforce are valid all the same, whatever the model wishes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from app_under_test import App
from samples import either, some

LETTERS = {"type": "string", "maxLength": 1}
SCHEMAS: dict[str, Any] = {
    "tags": {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": LETTERS, "uniqueItems": True, "minItems": 2, "maxItems": 6}},
        "required": ["tags"],
    },
    "pairs": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
        },
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 4,
    },
    "kinds": {
        "oneOf": [
            {
                "type": "object",
                "properties": {
                    "tags": {"type": "array", "items": LETTERS, "maxItems": 4, "uniqueItems": is_set},
                    "kind": {"const": kind},
                },
                "required": ["tags", "kind"],
                "additionalProperties": False,
            }
            for kind, is_set in (("set", True), ("a list of any items", False))
        ]
    },
    "patterns": {
        "type": "object",
        "patternProperties": {
            "^a": {"type": "array", "items": LETTERS, "uniqueItems": True, "maxItems": 3},
            "^b": {"type": "array", "items": LETTERS, "maxItems": 3},
        },
        "additionalProperties": False,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "sevens": {"type": "array", "items": {"type": "integer", "multipleOf": 1001}, "minItems": 1, "maxItems": 2},
}


@pytest.fixture(scope="module")
def app():
    with App() as running:
        yield running


def is_valid(name: str, text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(json.loads(text))


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_is_valid_and_comes_to_its_end(app: App, name, temperature):
    for seed in some(range(6), 2):
        params = {"json_schema": SCHEMAS[name], "max_new_tokens": 400, "temperature": temperature, "seed": seed}
        answer = app.generate(text=f"p{seed}", sampling_params=params)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert is_valid(name, answer["text"]), answer["text"]
        assert not answer["meta_info"].get("unenforced")
    app.check_idle()


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("limit", some([50, 60, 75, 90, 120], 3))
def test_with_little_left_it_is_brought_to_a_valid_end(app: App, name, limit):
    for seed in some(range(4), 2):
        params = {"json_schema": SCHEMAS[name], "max_new_tokens": limit, "temperature": 1, "seed": seed}
        answer = app.generate(text=f"p{seed}", sampling_params=params)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
        assert is_valid(name, answer["text"]), answer["text"]


@pytest.mark.sampled
def test_answers_in_company_are_those_that_come_alone(app: App):
    bodies = [
        {"text": f"p{at}", "sampling_params": {"json_schema": schema, "max_new_tokens": 400, "seed": at}}
        for at, schema in enumerate([*SCHEMAS.values()] * either(3, 2))
    ]
    alone = [app.generate(**body)["output_ids"] for body in bodies]

    async def together() -> Any:
        return await asyncio.gather(*(app.http.post("/generate", json=body) for body in bodies))

    assert [response.json()["output_ids"] for response in app.run(together())] == alone


def test_a_stream_says_the_same(app: App):
    body = {"text": "a", "sampling_params": {"json_schema": SCHEMAS["pairs"], "max_new_tokens": 400, "seed": 8}}
    assert app.events(**body)[-1]["output_ids"] == app.generate(**body)["output_ids"]


def value_schema(dice: random.Random, depth: int) -> dict[str, Any]:
    """A schema of bounded values, of which some keywords are only for a guard."""
    kinds = ["letters", "small", "multiple", *(["list", "list", "object", "reference"] if depth else [])]
    match dice.choice(kinds):
        case "letters":
            return {"type": "string", "maxLength": dice.randint(1, 2)}
        case "small":
            return {"type": "integer", "minimum": 0, "maximum": dice.choice([9, 12, 40])}
        case "multiple":
            return {"type": "integer", "multipleOf": dice.choice([23, 97, 143]), "minimum": 0}
        case "list":
            least = dice.randint(0, 3)
            items = value_schema(dice, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2, "uniqueItems": True}
        case "object":
            parts = {key: value_schema(dice, depth - 1) for key in dice.sample("abc", dice.randint(1, 2))}
            return {"type": "object", "properties": parts, "required": sorted(parts), "additionalProperties": False}
    return dice.choice(
        [
            {"anyOf": [value_schema(dice, depth - 1), {"type": "null"}]},
            {"allOf": [value_schema(dice, depth - 1), {"description": "the same"}]},
            {"$ref": "#/$defs/shared"},
        ]
    )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(40), 8))
def test_answers_to_random_schemas_are_valid(app: App, seed):
    dice = random.Random(seed)
    root = {"type": "array", "items": value_schema(dice, 2), "minItems": 1, "maxItems": 3, "uniqueItems": True}
    schema = {
        "$defs": {"shared": value_schema(dice, 0)},
        "type": "object",
        "properties": {"v": root},
        "required": ["v"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(either(3, 1)):
        params = {"json_schema": schema, "temperature": 1, "seed": dice.randrange(1000), "max_new_tokens": None}
        answer = app.generate(text="a", sampling_params=params)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        value = json.loads(answer["text"])
        assert validator.is_valid(value) or "unenforced" in answer["meta_info"], answer["text"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_limit_is_the_answer_is_whole_or_refused_with_the_least_number(app: App, name):
    params = {"json_schema": SCHEMAS[name], "temperature": 1}
    refused = app.post(text="p", sampling_params=params | {"max_new_tokens": 1})
    assert refused.json()["error"]["code"] == "max_new_tokens_too_small"
    least = int(re.search(r"send at least (\d+)", refused.json()["error"]["message"])[1])
    assert app.post(text="p", sampling_params=params | {"max_new_tokens": least - 1}).status_code == 400
    for limit in some(range(least, least + 16), 6):
        for seed in range(either(3, 1)):
            answer = app.generate(text="p", sampling_params=params | {"max_new_tokens": limit, "seed": seed})
            assert answer["meta_info"]["finish_reason"]["type"] == "stop", (limit, answer["text"])
            assert is_valid(name, answer["text"]), (limit, answer["text"])
    app.check_idle()
