"""What a JSON schema may not say: each is refused by name, and quickly."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from regexes import is_pattern_of_re
from samples import some

from tureen.grammar.expression import GrammarError
from tureen.grammar.regex import parse
from tureen.grammar.schema.keywords import MAX_BRANCHES
from tureen.grammar.schema.language import json_schema


def reason(schema, *, strict=False):
    with pytest.raises(GrammarError) as error:
        json_schema(schema if isinstance(schema, str) else json.dumps(schema), strict=strict)
    return str(error.value)


def left_out(schema):
    """What is left out of a schema where strict is not asked for, which strict refuses by the same name."""
    unenforced = json_schema(json.dumps(schema)).unenforced
    assert unenforced[0].why == reason(schema, strict=True)
    return list(map(str, unenforced))


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"type": "string", "minLenght": 3}, "minLength"),
        ({"properties": {"a": {"requierd": ["b"]}}}, "required"),
        ({"requried": ["b"]}, "required"),
        ({"items": {"anyof": [True]}}, "anyOf"),
        ({"additonalProperties": False}, "additionalProperties"),
        ({"additional_properties": False}, "additionalProperties"),
        ({"properites": {"a": {}}}, "properties"),
        ({"maxitems": 2}, "maxItems"),
        ({"patern": "a"}, "pattern"),
        ({"dependantSchemas": {"a": {}}}, "dependentSchemas"),
    ],
)
def test_a_name_that_is_nearly_a_keyword_is_refused_with_what_may_be_meant(schema, meant):
    assert f'did you mean "{meant}"?' in reason(schema)


@pytest.mark.parametrize(
    "note",
    [
        {"colour": "red"},
        {"cost": 3},
        {"patterns": ["a"]},
        {"types": ["string"]},
        {"allow": ["a"]},
        {"tsAdditionalProperties": False},
        {"enumNames": ["One"]},
        {"markdownDescription": "*a*"},
        {"meta:enum": {"a": "b"}},
        {"items": True, "item": {"type": "null"}},
        {"optional": True},
        {"contents": {"type": "string"}},
    ],
)
def test_any_other_unknown_keyword_is_an_annotation(note):
    language = json_schema(json.dumps({"type": "null"} | note), strict=True)
    assert language == json_schema('{"type": "null"}', strict=True)


@pytest.mark.parametrize(
    "keyword",
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "x-note"],
)
def test_annotations_are_let_through(keyword):
    assert json_schema(json.dumps({"type": "null", keyword: True})) == json_schema('{"type": "null"}')


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("type", "text"),
        ("type", []),
        ("properties", ["a"]),
        ("properties", {"a": 1}),
        ("required", "a"),
        ("required", [1]),
        ("minLength", -1),
        ("minLength", 1.5),
        ("minLength", "1"),
        ("maxItems", True),
        ("maximum", "1"),
        ("multipleOf", 0),
        ("enum", 1),
        ("anyOf", []),
        ("anyOf", {}),
        ("items", [1]),
        ("not", 1),
        ("uniqueItems", 1),
        ("$ref", 1),
        ("pattern", 1),
        ("dependentRequired", {"a": "b"}),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_by_its_keyword(keyword, value):
    keyword = {("items", "[1]"): "prefixItems"}.get((keyword, str(value)), keyword)
    assert f"\"{keyword}\" at '#/properties/x' must be" in reason({"properties": {"x": {keyword: value}}})


def test_a_long_value_of_the_wrong_form_is_cut_without_a_stray_quote():
    message = reason({"properties": {"x": {"type": "text" * 20}}})
    assert f'object, got "{"text" * 15}tex… (at' in message


@pytest.mark.parametrize(("keyword", "value", "limit"), [("enum", 1, "at most"), ("anyOf", True, "1 to")])
def test_a_list_that_is_too_long_is_refused_with_its_length_and_the_limit(keyword, value, limit):
    message = reason({keyword: [value] * (MAX_BRANCHES + 1)})
    assert f"\"{keyword}\" at '#' must be a list of {limit} {MAX_BRANCHES} " in message
    assert message.endswith(f"got {MAX_BRANCHES + 1} of them")


@pytest.mark.parametrize(
    "reference",
    [
        "http://json-schema.org/draft-03/schema#",
        "http://json-schema.org/draft-07/schema#/missing",
        "https://json-schema.org/draft/2020-12/hyper-schema",
        "other.json",
        "#/$defs/missing",
        "#missing",
        "#/type",
        "file:///etc/passwd",
        "http://[",
    ],
)
def test_a_reference_that_leaves_the_document_is_refused(reference):
    assert "nothing is fetched" in reason({"type": "object", "properties": {"a": {"$ref": reference}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_schema_that_is_defined_by_itself_is_refused(schema):
    assert "circle" in reason(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "string", "const": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["a"], "maxProperties": 0},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "string", "minLength": 3, "pattern": "^..$"},
        {"not": {}},
    ],
)
def test_a_schema_without_valid_values_is_refused(schema):
    assert "no JSON value is valid" in reason(schema)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "not": {"uniqueItems": True, "items": {"type": "string"}}}, "uniqueItems"),
        ({"type": "object", "minProperties": 27}, "minProperties"),
        ({"type": "object", "not": {"maxProperties": 26}}, "minProperties"),
        ({"not": {"format": "date"}}, "format"),
        ({"oneOf": [{"format": "date"}, {"maxLength": 3}]}, "format"),
        ({"not": {"oneOf": [{"required": ["a"]}], "discriminator": {"propertyName": "b"}}}, "discriminator"),
        ({"not": {"properties": {"a": {"allOf": [{"format": "date"}, {"maxLength": 9}]}}}}, "format"),
        ({"oneOf": [{"properties": {"a": {"format": "date"}}}, {"properties": {"a": {"format": "uri"}}}]}, "format"),
        ({"contains": {"const": 1}, "minContains": 5000}, "contains"),
        ({"maxLength": 10**9}, "maxLength"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_keyword_if_strict_and_else_left_out(schema, keyword):
    assert keyword in reason(schema, strict=True)
    assert left_out(schema)


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, ["uniqueItems at /tags"]),
        ({"items": {"properties": {"a/b": {"pattern": r"(x)\1"}}}, "minItems": 1}, ["pattern at /*/a~1b"]),
        ({"prefixItems": [True, {"maxLength": 10**6}]}, ["maxLength at /1"]),
        ({"additionalProperties": {"multipleOf": 1e-15}}, ["multipleOf at /*"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"uniqueItems": True}, "c": {"$ref": "#"}}}}},
            ["uniqueItems at /b"],
        ),
        ({"anyOf": [{"type": "null"}, {"not": {"format": "date"}}]}, ["not at the root"]),
        ({"patternProperties": {r"^(a)\1$": {"type": "null"}}}, ["patternProperties at the root"]),
        ({"type": "array", "uniqueItems": True, "allOf": [{"uniqueItems": True}]}, ["uniqueItems at the root"]),
    ],
)
def test_what_is_left_out_is_named_with_its_place_in_the_output(schema, places):
    assert left_out(schema) == places


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nothing",
        '{"maximum": NaN}',
        '{"type": "null", "type": "string"}',
        "[" * 30_000,
        '{"not": ' * 300 + "true" + "}" * 300,
        '{"const": "\\ud800"}',
        '"string"',
    ],
)
def test_a_text_that_is_no_schema_is_refused(text):
    assert reason(text).startswith("json_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]},
        {"dependentSchemas": {f"a{i}": {"required": [f"b{i}"]} for i in range(40)}},
        {"not": {"anyOf": [{"required": [f"a{i}", f"b{i}", f"c{i}"]} for i in range(40)]}},
        {"oneOf": [{"properties": {f"a{i}": {"type": "string"}, f"b{i}": {"type": "null"}}} for i in range(40)]},
        {"patternProperties": {f"a{i}": {"const": i} for i in range(40)}},
        {"anyOf": [{"properties": {f"a{i}": True}} for i in range(40)], "unevaluatedProperties": False},
    ],
)
def test_combinations_that_grow_without_end_are_refused_if_strict_and_else_left_out(schema):
    assert "too large" in reason(schema, strict=True)
    assert left_out(schema)


def test_schemas_nested_in_one_another_about_one_value_are_refused():
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1000)} | {"a1000": True}
    assert "40 levels" in reason({"$ref": "#/$defs/a0", "$defs": definitions})


def test_two_schemas_with_one_identifier_are_refused_where_it_is_used():
    twice = {"$defs": {"a": {"$id": "x", "type": "null"}, "b": {"$id": "x"}}}
    assert "names two" in reason({"$ref": "x"} | twice)
    assert json_schema(json.dumps({"$ref": "#/$defs/a"} | twice)) == json_schema('{"type": "null"}')
    anchors = {"$defs": {"a": {"$anchor": "x", "type": "null"}, "b": {"$anchor": "x"}}}
    assert "names two" in reason({"$ref": "#x"} | anchors)
    assert json_schema(json.dumps({"$ref": "#/$defs/a"} | anchors)) == json_schema('{"type": "null"}')


MALFORMED = [
    "(a", "a)", "[a", "a\\", "*a", "a|*", "a**", "a{2}{3}", "a{3,2}", "[b-a]", "(?:a", "(?=a", r"(x)\1(a", "(?>a",
    r"\Za)", "(" * 1_000, "x" * 70_000 + "[",
    "(?<n>a)(?<n>b)", "(?<1a>b)", "(?<>a)", "(?z)a", "(?zz:a)", r"(?<n>a)\k<m>", r"(?<n>a)\k",
    r"(x)\1^*", r"(x)\1a{3,2}", r"(x)\1[b-a]", "a++*", "(?(1)a)", "(?P=n)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", MALFORMED)
def test_a_malformed_pattern_is_refused_wherever_it_is_as_a_malformed_regex_is(pattern):
    assert not is_pattern_of_re(pattern)
    with pytest.raises(GrammarError):
        parse(pattern, flavour="python")
    for keyword in ({"pattern": pattern}, {"patternProperties": {pattern: True}}):
        for kind in ("string", "object", "integer"):
            assert "#/properties/x" in reason({"properties": {"x": {"type": kind} | keyword}})


@pytest.mark.parametrize(
    "pattern",
    [
        r"(x)\1",
        r"\k<n>",
        r"(?<n>a)\k<n>",
        r"\8",
        "(?i:a)",
        "(?s)a",
        "(?P<name>a)",
        "(?>a)b",
        "a++",
        r"\Aa\Z",
        r"\p{Print}",
        "a{,3}",
    ],
)
def test_a_pattern_of_another_dialect_is_left_out_and_told(pattern):
    assert left_out({"type": "string", "pattern": pattern}) == ["pattern at the root"]


def finite(random, depth=2):
    """A schema, and the texts of all its values, which are written out here."""
    kind = random.choice(["boolean", "enum", "integer"] + ["object", "array", "tuple"] * (depth > 0))
    if kind == "boolean":
        return {"type": "boolean"}, {"true", "false"}
    if kind == "enum":
        texts = set(random.sample(['"a"', '"b"', "null", "7", "true", '{"k": 1}'], random.randrange(1, 4)))
        return {"enum": [json.loads(text) for text in texts]}, texts
    if kind == "integer":
        first, number = random.randrange(-3, 3), random.randrange(1, 4)
        last = first + number - 1
        return {"type": "integer", "minimum": first, "maximum": last}, {str(first + at) for at in range(number)}
    if kind == "object":
        parts = {key: (random.random() < 0.6, *finite(random, depth - 1)) for key in "ab"[: random.randrange(1, 3)]}
        members = [
            [f'"{key}": {text}' for text in texts] + [None] * (not is_required)
            for key, (is_required, _, texts) in parts.items()
        ]
        schema = {
            "type": "object",
            "properties": {key: part[1] for key, part in parts.items()},
            "required": [key for key, part in parts.items() if part[0]],
        } | random.choice([{}, {"additionalProperties": False}])
        return schema, {"{" + ", ".join(filter(None, each)) + "}" for each in itertools.product(*members)}
    inner, texts = finite(random, depth - 1)
    if kind == "tuple":
        pairs = {f"[{first}, {second}]" for first in texts for second in ("true", "false")}
        return {"prefixItems": [inner, {"type": "boolean"}], "type": "array", "items": False, "minItems": 2}, pairs
    most = random.randrange(1, 3)
    lists = {each for size in range(most + 1) for each in itertools.permutations(texts, size)}
    schema = {"type": "array", "items": inner, "maxItems": most, "uniqueItems": True}
    return schema, {f"[{', '.join(each)}]" for each in lists}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(150), 30))
def test_more_different_items_than_there_are_values_are_refused(seed):
    schema, texts = finite(random.Random(seed))
    array = {"type": "array", "items": schema, "uniqueItems": True}
    assert json_schema(json.dumps(array | {"minItems": len(texts)}))
    assert "no JSON value is valid" in reason(array | {"minItems": len(texts) + 1})


def test_a_number_of_items_that_contain_something_else_than_there_is_is_refused():
    array = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "uniqueItems": True}
    wanted = {"contains": {"multipleOf": 4}}
    assert json_schema(json.dumps(array | wanted | {"minContains": 2}))
    assert "no JSON value is valid" in reason(array | wanted | {"minContains": 3})
