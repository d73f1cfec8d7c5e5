"""Models as people write them with pydantic: each compiles, takes its own values, and nothing that it refuses."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from matching import matches
from pydantic import TypeAdapter, ValidationError
from pydantic_models import INSTANCES, MODELS, NOT_TOLD
from random_schemas import Walk

from tureen.grammar.schema.language import json_schema

FILE = Path(__file__).resolve().parents[1] / "golden" / "pydantic_schemas.json"
SCHEMAS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
TOO_LARGE = ("WithUrl",)
"""The models whose language is not walked: the walk makes a whole automaton of each string."""
CASES = [(name, kind) for name in MODELS for kind in ("pydantic", "openai")]


def is_model(name: str, text: str) -> bool:
    try:
        TypeAdapter(MODELS[name]).validate_json(text)
    except ValidationError:
        return False
    return True


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def changed(value: Any) -> Iterator[Any]:
    """The value with one part of it left out, or replaced by something of another kind."""
    for other in (None, 17, -0.25, "x", [], {}, True):
        yield other
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for part in changed(value[key]):
                other = copy.copy(value)
                other[key] = part
                yield other
            other = copy.copy(value)
            del other[key]
            yield other


def test_there_are_sixty_models_with_a_schema_and_a_value_each():
    assert len(MODELS) >= 60
    assert set(MODELS) == set(INSTANCES) == set(SCHEMAS)


@pytest.mark.parametrize("name", MODELS)
def test_the_value_is_one_of_the_model(name):
    assert is_model(name, dumped(INSTANCES[name]))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_language_has_the_models_value_and_no_change_of_it_that_the_schema_refuses(name, kind):
    schema = SCHEMAS[name][kind]
    language = json_schema(json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    value = INSTANCES[name]
    assert matches(language, dumped(value)) == validator.is_valid(value)
    num_refused = 0
    for other in changed(value):
        if not validator.is_valid(other):
            num_refused += 1
            assert not matches(language, dumped(other)), other
    assert num_refused or name == "WithAnyAndObject"


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] not in TOO_LARGE])
def test_what_the_language_has_is_valid_for_the_model_itself(name, kind):
    schema = SCHEMAS[name][kind]
    language = json_schema(json.dumps(schema))
    walk = Walk(language, random.Random(name))
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    for _ in range(12):
        text = walk.text(language.start)
        assert name == "WithByteSize" or validator.is_valid(json.loads(text)), text
        assert is_model(name, text) or name in NOT_TOLD, text


def test_the_longest_duration_is_one_that_pydantic_takes():
    longest = "P999999Y999999M999999DT999999H999999M999999S"
    assert is_model("WithDelta", dumped({"lasts": longest}))
    language = json_schema('{"type": "string", "format": "duration"}')
    assert matches(language, f'"{longest}"')
    assert not matches(language, '"P1234567D"')
