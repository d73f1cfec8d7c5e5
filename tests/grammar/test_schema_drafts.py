"""The drafts of JSON Schema: each by its own rules, what names none as it is meant. The test suite has the rest."""

from __future__ import annotations

import json

import pytest
from matching import matches

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.drafts import declared
from tureen.grammar.schema.language import json_schema


def read(schema):
    return json_schema(json.dumps(schema), strict=True)


@pytest.mark.parametrize(
    ("uri", "draft"),
    [
        ("http://json-schema.org/draft-04/schema#", "draft-04"),
        ("https://json-schema.org/draft-04/schema", "draft-04"),
        ("http://json-schema.org/draft-06/schema", "draft-06"),
        ("https://json-schema.org/draft-07/schema#", "draft-07"),
        ("http://json-schema.org/draft-07/schema", "draft-07"),
        ("https://json-schema.org/draft/2019-09/schema", "2019-09"),
        ("http://json-schema.org/draft/2020-12/schema#", "2020-12"),
        ("https://vendor.example/draft-07/schema#", None),
        ("https://spec.openapis.org/oas/3.1/dialect/base", None),
        ("http://json-schema.org/schema#", None),
        ("", None),
        (7, None),
    ],
)
def test_a_draft_is_known_by_its_uri_however_it_is_spelled(uri, draft):
    assert declared({"$schema": uri}) == draft


OLD_AND_NEW = [
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 3}),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, {"type": "integer", "minimum": 3}),
    ({"type": "integer", "maximum": 3, "exclusiveMaximum": True}, {"type": "integer", "exclusiveMaximum": 3}),
    ({"items": [{"const": 1}]}, {"prefixItems": [{"const": 1}]}),
    ({"items": [{"const": 1}], "additionalItems": False}, {"prefixItems": [{"const": 1}], "items": False}),
    ({"items": [], "additionalItems": {"const": 1}}, {"items": {"const": 1}}),
    ({"items": {"const": 1}, "additionalItems": False}, {"items": {"const": 1}}),
    ({"dependencies": {"a": ["b"], "c": "d"}}, {"dependentRequired": {"a": ["b"], "c": ["d"]}}),
    ({"dependencies": {"a": {"required": ["b"]}}}, {"dependentSchemas": {"a": {"required": ["b"]}}}),
    ({"properties": {"a": {"required": True}, "b": {}}}, {"properties": {"a": {}, "b": {}}, "required": ["a"]}),
    ({"type": "any", "enum": [1]}, {"enum": [1]}),
    ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
    ({"type": ["string", "integer"], "nullable": True}, {"type": ["string", "integer", "null"]}),
    ({"type": "string", "nullable": False}, {"type": "string"}),
    ({"definitions": {"a": {"const": 1}}, "$ref": "#/definitions/a"}, {"const": 1}),
    ({"properties": {"a": {"id": "#x", "const": 1}, "b": {"$ref": "#x"}}},
     {"properties": {"a": {"const": 1}, "b": {"const": 1}}}),
    ({"properties": {"a": {"id": "x.json", "const": 1}, "b": {"$ref": "x.json"}}},
     {"properties": {"a": {"const": 1}, "b": {"const": 1}}}),
    ({"properties": {"a": {"id": "/a", "$ref": "#/definitions/b"}}, "definitions": {"b": {"const": 1}}},
     {"properties": {"a": {"const": 1}}}),
    ({"items": [{"const": 1}, {"$ref": "#/items/0"}]}, {"prefixItems": [{"const": 1}, {"const": 1}]}),
]  # fmt: skip


@pytest.mark.parametrize("schema", [{}, {"$schema": "https://vendor.example/meta"}])
@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_what_names_no_draft_is_read_as_it_is_meant(schema, old, new):
    assert read(schema | old) == read(new)


@pytest.mark.parametrize(
    ("draft", "schema", "same"),
    [
        ("draft-04", {"const": 1, "if": False, "contains": False, "propertyNames": False}, True),
        ("draft-04", {"id": "http://x/y", "$id": "http://z/"}, True),
        ("draft-06", {"if": True, "then": False}, True),
        ("draft-06", {"const": 1}, {"const": 1}),
        ("draft-07", {"prefixItems": [False], "dependentRequired": {"a": ["b"]}, "unevaluatedItems": False}, True),
        ("draft-07", {"$ref": "#/definitions/a", "type": "null", "definitions": {"a": {"const": 1}}}, {"const": 1}),
        ("draft/2019-09", {"prefixItems": [False], "$dynamicRef": "#a"}, True),
        ("draft/2019-09", {"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {"const": 1}}}, False),
        ("draft/2020-12", {"additionalItems": False, "$recursiveRef": "#"}, True),
        ("draft/2020-12", {"type": "string", "nullable": True}, {"type": "string"}),
    ],
)
def test_a_keyword_that_a_draft_does_not_have_is_an_annotation_there(draft, schema, same):
    schema = {"$schema": f"https://json-schema.org/{draft}/schema"} | schema
    if same is False:
        with pytest.raises(GrammarError, match="no JSON value"):
            read(schema)
    else:
        assert read(schema) == read(same)


def test_a_schema_inside_may_be_of_another_draft_where_it_has_an_identifier():
    inside = {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x/old", "const": 1, "type": "null"}
    outside = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/a", "$defs": {"a": inside}}
    assert read(outside) == read({"type": "null"})
    del inside["id"]
    with pytest.raises(GrammarError, match="no JSON value"):
        read(outside)


def test_a_recursive_reference_leads_to_the_outermost_schema_that_wants_it():
    tree = {"$id": "tree", "$recursiveAnchor": True, "type": "object", "properties": {"a": {"$recursiveRef": "#"}}}
    for schema in ({}, {"$schema": "https://json-schema.org/draft/2019-09/schema"}):
        strict_tree = schema | {
            "$id": "http://x/strict-tree",
            "$recursiveAnchor": True,
            "$ref": "tree",
            "unevaluatedProperties": False,
            "$defs": {"tree": dict(tree)},
        }
        language = json_schema(json.dumps(strict_tree), leaves_out=False, strict=True)
        assert matches(language, '{"a": {"a": {}}}')
        assert not matches(language, '{"a": {"b": {}}}')
        loose = json_schema(json.dumps(schema | {"$ref": "tree", "$defs": {"tree": tree}}), leaves_out=False)
        assert matches(loose, '{"a": {"b": {}}}')
