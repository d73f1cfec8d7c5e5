"""Schemas that say the same in several places of a document are one, wherever a report is due for each."""

from __future__ import annotations

import json

import jsonschema
import pytest
from matching import matches

from tureen.grammar.schema.language import json_schema

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string"}, "boss": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}},
    "required": ["name"],
}
DEFS = {"name": {"enum": ["Ann", "Bob"]}}


def document(make_person):
    keys = ["first", "second", "third"]
    return {"type": "object", "properties": {key: make_person(key) for key in keys}, "$defs": DEFS | {"person": PERSON}}


def test_what_is_written_out_in_each_place_makes_no_more_rules_than_references_to_one_place():
    copied = json_schema(json.dumps(document(lambda key: PERSON | {"title": key, "description": f"the {key} one"})))
    referred = json_schema(json.dumps(document(lambda key: {"$ref": "#/$defs/person"})))
    assert copied == referred


@pytest.mark.parametrize(
    ("keyword", "inside"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        ("pattern", {"type": "string", "pattern": r"^(a+) \1$"}),
        ("not", {"type": "string", "not": {"format": "date"}}),
        ("minLength", {"type": "string", "minLength": 200_000}),
    ],
)
def test_what_is_not_enforced_is_told_of_each_place(keyword, inside):
    schema = {"$defs": {"unused": inside}, "properties": {"a": inside, "b": {"properties": {"c": inside}}}}
    told = sorted(json_schema(json.dumps(schema)).unenforced)
    assert [(item.keyword, item.place, item.schema) for item in told] == [
        (keyword, "/a", "#/properties/a"),
        (keyword, "/b/c", "#/properties/b/properties/c"),
    ]
    assert [f"(at '{item.schema}')" in item.why for item in told] == [True, True]


def test_what_is_not_enforced_is_told_of_the_alternative_that_says_it():
    texts = {"type": "string"}
    schema = {
        "properties": {"a": {"oneOf": [texts, {"type": "array", "items": texts, "uniqueItems": True}]}, "b": texts}
    }
    [told] = json_schema(json.dumps(schema)).unenforced
    assert (told.keyword, told.place, told.schema) == ("uniqueItems", "/a", "#/properties/a/oneOf/1")


@pytest.mark.parametrize(
    "inside",
    [
        {"type": "array", "maxItems": 3000, "not": {"items": {"type": "string"}}},
        {"type": "array", "oneOf": [{"items": {"type": "string"}}, {"maxItems": 3000}]},
    ],
)
def test_what_follows_from_other_keywords_is_told_of_each_schema_that_has_them(inside):
    # arrays must contain something but strings
    language = json_schema(json.dumps({"properties": {"a": inside, "c": inside}}), guards=True)
    assert sorted((item.keyword, item.place) for item in language.guarded) == [("contains", "/a"), ("contains", "/c")]


def test_a_schema_is_told_of_once_however_it_is_read():
    inside = {"minLength": 200_000, "properties": {"s": {"type": "string"}}}
    schema = {"properties": {"x": inside, "y": inside}, "allOf": [inside], "unevaluatedProperties": False}
    told = [(item.keyword, item.schema) for item in json_schema(json.dumps(schema)).unenforced]
    assert len(told) == len(set(told))
    assert {("minLength", "#/properties/x"), ("minLength", "#/properties/y"), ("minLength", "#/allOf/0")} <= {*told}


def test_what_two_schemas_combine_alike_is_told_of_both():
    inside = {"not": {"format": "date"}}
    schema = {"properties": {"a": {"type": "string", **inside}, "b": {"type": "string", "minLength": 3, **inside}}}
    assert {(item.keyword, item.place) for item in json_schema(json.dumps(schema)).unenforced} == {
        ("not", "/a"),
        ("not", "/b"),
    }


def test_a_guard_that_is_sure_in_one_place_is_told_so_whatever_it_is_elsewhere():
    tags = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
    counted = {"type": "array", "items": tags, "contains": tags, "minContains": 2}  # no guard looks into counted items
    language = json_schema(json.dumps({"properties": {"a": tags, "b": counted}}), guards=True)
    assert [(item.keyword, item.place) for item in language.guarded] == [("uniqueItems", "/a")]


LIKE_EACH_OTHER = [
    {"const": 1},
    {"const": True},
    {"const": "1"},
    {"const": [1]},
    {"const": ["1"]},
    {"const": ["a"]},
    {"const": ["A"]},
    {"const": {"a": 1}},
    {"const": {"a": True}},
    {"type": "integer", "minimum": 1},
    {"type": "integer", "maximum": 1},
    {"items": {"const": 1}, "type": "array"},
    {"items": {"const": "1"}, "type": "array"},
    {"prefixItems": [{"const": 1}], "type": "array", "minItems": 1},
    {"anyOf": [{"const": 1}, {"const": "a"}]},
    {"allOf": [{"const": 1}, {"const": "a"}]},
    {"not": {"const": 1}},
    {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"},
    {"properties": {"title": {"const": 1}}, "required": ["title"], "type": "object"},
    {"properties": {"title": {"const": 2}}, "required": ["title"], "type": "object"},
    {"properties": {"a": True}, "additionalProperties": False, "type": "object"},
    {"properties": {"a": False}, "additionalProperties": False, "type": "object"},
    True,
]
VALUES = [
    1,
    True,
    "1",
    "a",
    2,
    [],
    [1],
    ["1"],
    ["a"],
    ["A"],
    [1, 2],
    {},
    {"a": 1},
    {"a": True},
    {"title": 1},
    {"title": 2},
    None,
]


@pytest.mark.parametrize("order", [1, -1])
def test_schemas_that_differ_are_told_apart_however_much_they_are_alike(order):
    """All of them are in one schema, in both orders: each comes before each other one."""
    properties = {f"p{index}": schema for index, schema in enumerate(LIKE_EACH_OTHER[::order])}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    language = json_schema(json.dumps(schema))
    texts = [json.dumps({key: value}) for key in properties for value in VALUES]
    validator = jsonschema.Draft202012Validator(schema)
    assert [text for text in texts if matches(language, text)] == [
        text for text in texts if validator.is_valid(json.loads(text))
    ]


def test_the_same_reference_means_what_its_own_resource_has():
    def resource(name, value):
        return {
            "$id": f"https://example.org/{name}",
            "allOf": [{"$ref": "#/$defs/x"}],
            "$defs": {"x": {"const": value}},
        }

    language = json_schema(json.dumps({"prefixItems": [resource("a", 1), resource("b", 2)], "minItems": 2}))
    assert [matches(language, text) for text in ("[1, 2]", "[1, 1]", "[2, 2]")] == [True, False, False]
