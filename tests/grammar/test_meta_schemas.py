"""References to the official meta-schemas, against their publisher's package and a JSON schema validator."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest
from jsonschema_specifications import REGISTRY
from real_schemas import Writing, compiler, corpus

from tureen.grammar.expression import GrammarError
from tureen.grammar.guard.guarded import load_guarded
from tureen.grammar.schema import meta_schemas
from tureen.grammar.schema.language import json_schema

ANNOTATIONS = ("title", "description", "$comment", "default", "$vocabulary")
NAMED = ("properties", "definitions", "$defs", "patternProperties", "dependencies")
DRAFTS = [
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]


PUBLISHED = {uri.rstrip("#"): REGISTRY[uri].contents for uri in REGISTRY if "-03" not in uri}
SCHEMES = ("http://", "https://")


def validator_for(schema):
    """Returns a validator that knows the published meta-schemas."""
    known = [(scheme + uri.partition("://")[2], document) for uri, document in PUBLISHED.items() for scheme in SCHEMES]
    return jsonschema_rs.validator_for(
        schema, registry=jsonschema_rs.Registry(known), offline=True, validate_formats=True
    )


def without_annotations(schema):
    if isinstance(schema, list):
        return list(map(without_annotations, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: without_annotations(item) for name, item in value.items()}
        if key in NAMED
        else without_annotations(value)
        for key, value in schema.items()
        if key not in ANNOTATIONS
    }


def test_the_meta_schemas_are_those_that_are_published_without_annotations():
    published = {uri: without_annotations(document) for uri, document in PUBLISHED.items()}
    assert {uri: meta_schemas.official(uri) for uri in published} == published
    assert json.loads(meta_schemas.FILE.read_text(encoding="utf-8")).keys() == published.keys()


def compiled(schema):
    """The grammar of a schema that may be written by it, keys in any order."""
    language = json_schema(json.dumps(schema), leaves_out=False, guards=True)
    assert language.unenforced == ()
    return load_guarded(compiler().translate(language), language.guard, compiler())


@pytest.mark.parametrize("uri", DRAFTS)
def test_what_may_be_written_is_a_schema_to_the_validator(uri):
    validator = validator_for({"$ref": uri})
    grammar, valid = compiled({"$ref": uri}), 0
    values = [
        True, 1, [], {}, {"type": "string"}, {"type": "text"}, {"type": ["null", "null"]}, {"minLength": -1},
        {"properties": {"a": {"type": 1}}}, {"properties": {"a": {"items": {"type": "null"}}}}, {"allOf": []},
        {"allOf": [{"not": {"minimum": "1"}}]}, {"allOf": [{"not": {"minimum": 1.5}}]}, {"required": ["a", "a"]},
        {"additionalProperties": {"enum": [1, "a"], "pattern": "^a{1,3}$"}}, {"pattern": 1}, {"x-any": [1]},
        {"dependencies": {"a": ["b"], "c": {"type": 1}}}, {"$ref": "#/a"}, {"$ref": 1}, {"exclusiveMinimum": True},
    ]  # fmt: skip
    for value in values:
        is_valid = validator.is_valid(value)
        valid += is_valid
        assert Writing(grammar).can_write(value) == is_valid, value
    assert 7 < valid < len(values) - 5


@pytest.mark.parametrize(
    "reference",
    [
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-07/schema#/definitions/nonNegativeInteger",
        "http://json-schema.org/draft-04/schema#/properties/minLength",
        "https://json-schema.org/draft/2019-09/meta/validation#/$defs/stringArray",
        "https://json-schema.org/draft/2020-12/meta/core#/$defs/anchorString",
        "https://json-schema.org/draft/2020-12/schema#meta",
    ],
)
def test_a_reference_may_have_a_fragment_and_either_scheme(reference):
    validator = validator_for({"$ref": reference})
    grammar = compiled({"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"]})
    for value in (1, -1, True, "a", "+", ["a"], ["a", "a"], {"type": 1}, {"type": "null"}):
        assert Writing(grammar).can_write({"a": value}) == validator.is_valid(value), value


def test_a_schema_that_extends_a_dynamic_meta_schema_is_meant_inside_too():
    schema = {
        "$schema": DRAFTS[-1],
        "$id": "https://example.com/mine",
        "$dynamicAnchor": "meta",
        "allOf": [{"$ref": DRAFTS[-1]}],
        "properties": {"x-unit": {"enum": ["m", "s"]}},
    }
    validator, grammar = validator_for(schema), compiled(schema)
    for value in ({"x-unit": "m"}, {"x-unit": "kg"}, {"items": {"x-unit": "s"}}, {"items": {"x-unit": "kg"}}):
        assert Writing(grammar).can_write(value) == validator.is_valid(value), value


def test_a_document_with_a_copy_of_a_meta_schema_means_its_own():
    uri = "http://json-schema.org/draft-07/schema#"
    schema = {"$ref": uri, "definitions": {"own": {"$id": uri, "type": "null"}}}
    assert json_schema(json.dumps(schema)) == json_schema('{"type": "null"}')


def test_what_is_wrong_in_a_reference_to_a_meta_schema_is_told_with_its_place():
    with pytest.raises(GrammarError, match=r"schema#/properties/nope.*at '#/properties/a' leads to no schema"):
        json_schema('{"properties": {"a": {"$ref": "http://json-schema.org/draft-07/schema#/properties/nope"}}}')


def test_no_schema_without_such_a_reference_reads_the_meta_schemas(monkeypatch):
    monkeypatch.setattr(meta_schemas, "official", None)
    for text in list(corpus().values())[::400]:
        json_schema(text)
