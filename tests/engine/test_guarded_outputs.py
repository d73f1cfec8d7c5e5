"""Outputs under a guard (uniqueItems, contains, counts of keys, multiples) are valid within any limit, whatever is
drawn."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import pytest
from constrained_outputs import least_of, limited, make_engine, run
from samples import some


def guarded_schema(dice, depth=2):
    """A schema of bounded values, most of whose keywords no grammar can keep."""
    kinds = ["letters", "numbers", "multiple", "choice"]
    kinds += ["unique", "counted", "keys", "object", "either"] if depth else []
    inner = depth - 1
    match dice.choice(kinds):
        case "letters":
            return {"type": "string", "minLength": dice.randint(0, 1), "maxLength": dice.randint(1, 3)}
        case "numbers":
            return {"type": dice.choice(["integer", "number"]), "minimum": dice.randint(-3, 0), "maximum": 30}
        case "multiple":
            step, low = dice.choice([7, 0.25, 97, 143]), dice.choice([0, -500, 12])
            return {"type": "number", "multipleOf": step, "minimum": low, "maximum": low + 1000}
        case "choice":
            return {"enum": dice.sample(["a", "ab", "aba", 1, 10, 100, True, None, [1], {"k": 1}], 5)}
        case "unique":
            least = dice.randint(0, 3)
            items = guarded_schema(dice, inner)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2, "uniqueItems": True}
        case "counted":
            wanted = dice.choice([{"type": "integer"}, {"const": "a"}, {"type": "string", "maxLength": 1}])
            least = dice.randint(1, 3)
            is_unique = "const" not in wanted and dice.random() < 0.5
            items = {"anyOf": [wanted, guarded_schema(dice, 0)]}
            counts = {"contains": wanted, "minContains": least, "maxContains": least + dice.randint(0, 2)}
            return {"type": "array", "items": items, "maxItems": least + 2, "uniqueItems": is_unique, **counts}
        case "keys":
            least = dice.randint(1, 3)
            names = {"propertyNames": {"pattern": "^[a-c]{1,2}$"}} if dice.random() < 0.5 else {}
            values = guarded_schema(dice, inner)
            return {"type": "object", "additionalProperties": values, "minProperties": least,
                    "maxProperties": least + 2, **names}  # fmt: skip
        case "object":
            parts = {key: guarded_schema(dice, inner) for key in dice.sample("abc", dice.randint(1, 3))}
            required = dice.sample(sorted(parts), dice.randint(0, len(parts)))
            return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}
    return {"anyOf": [guarded_schema(dice, inner), guarded_schema(dice, inner)]}


@pytest.mark.sampled
@pytest.mark.parametrize("part", some(range(12), 2))
def test_random_numbers_under_random_guards_and_random_limits_make_valid_json(part):
    dice = random.Random(part)
    cases = []
    for index in range(10):
        schema = guarded_schema(dice)
        text = json.dumps(schema)
        most = least_of("json_schema", text) + dice.choice([0, 0, 1, 2, 5, 20, 60])
        request = limited(str(index), "json_schema", text, most, seed=index, temperature=dice.choice([0.0, 1.0]))
        cases.append((request, schema, most))
    answers = run(make_engine(), *(request for request, _, _ in cases))
    for request, schema, most in cases:
        text, token_ids, finish = answers[request.id]
        assert finish.type == "stop", (schema, most, text, finish)
        assert len(token_ids) <= most
        value = json.loads(text)
        assert jsonschema.Draft202012Validator(schema).is_valid(value), (schema, most, text)


NUMBERS = {"type": "number", "minimum": -3, "maximum": 30}
SHORT = [*range(12), 23, 46, 69, -1, 0.5, "", "a", "b", None, True, False, [], [0]]
GUARDED = [
    {"type": "array", "items": NUMBERS, "minItems": 3, "uniqueItems": True},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, NUMBERS]}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "items": {"type": "array", "items": NUMBERS}, "minItems": 2, "uniqueItems": True},
    {"type": "array", "contains": {"type": "string"}, "minContains": 2, "uniqueItems": True},
    {"type": "array", "items": {"type": "string"}, "minItems": 3, "uniqueItems": True},
    {"type": "object", "additionalProperties": {"type": "integer", "multipleOf": 23}, "minProperties": 2},
]


def shortest(schema):
    """The length of the shortest valid text, of lists and objects of a few short values."""
    lists = [list(items) for size in range(4) for items in itertools.product(SHORT, repeat=size)]
    keys = itertools.combinations(["", "a", "b"], 2)
    objects = [dict(zip(some, values, strict=True)) for some in keys for values in itertools.product(SHORT, repeat=2)]
    validator = jsonschema.Draft202012Validator(schema)
    values = lists if schema["type"] == "array" else objects
    for text in sorted((json.dumps(value) for value in values), key=len):
        if validator.is_valid(json.loads(text)):
            return len(text)
    raise AssertionError(schema)


@pytest.mark.parametrize("schema", GUARDED)
def test_the_least_number_that_a_refusal_names_is_that_of_the_shortest_answer_under_a_guard(schema):
    assert least_of("json_schema", json.dumps(schema)) == shortest(schema)  # a token is a byte here


def test_more_different_items_than_there_are_values_are_refused_before_anything_runs():
    few = {"enum": [*"abcdefghijkl"]}
    either = {"anyOf": [{"const": "a"}, {"type": "number"}]}
    for schema, is_refused in (
        ({"items": few, "minItems": 13}, True),
        ({"items": few, "minItems": 12}, False),
        ({"items": either, "contains": {"const": "a"}, "minContains": 2}, True),
        ({"items": either, "contains": {"const": "a"}, "minContains": 1}, False),
    ):
        text = json.dumps({"type": "array", "uniqueItems": True, **schema})
        [(_, _, finish)] = run(make_engine(), limited("a", "json_schema", text, 300)).values()
        assert (finish.type == "error" and finish.code == "invalid_json_schema") == is_refused, (schema, finish)
