"""The language of a JSON schema: its layout, its order, its size, and what the suite of JSON Schema does not ask."""

from __future__ import annotations

import json

import pytest
from matching import matches

from tureen.grammar.expression import Language, RuleCall, Terminal
from tureen.grammar.schema.language import json_schema

OPEN_PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


def accepted(schema, *texts):
    language = json_schema(json.dumps(schema), leaves_out=False)
    return [text for text in texts if matches(language, text)]


def written(schema, *texts):
    """Of these texts the ones that the server may write."""
    language = json_schema(json.dumps(schema))
    return [text for text in texts if matches(language, text)]


def test_keys_that_the_schema_does_not_speak_of_are_not_written():
    texts = ("{}", '{"name": "x"}', '{"name": "x", "age": 1}', '{"name": "x", "more": 1}', '{"more": 1}')
    assert written(OPEN_PERSON, *texts) == [*texts[:3]]
    assert written(OPEN_PERSON | {"additionalProperties": True}, *texts) == [*texts]
    assert written(OPEN_PERSON | {"additionalProperties": {"type": "null"}}, *texts) == [*texts[:3]]
    assert written(OPEN_PERSON | {"patternProperties": {"^m": {"type": "integer"}}}, *texts) == [*texts]
    assert written(OPEN_PERSON | {"unevaluatedProperties": {"type": "integer"}}, *texts) == [*texts]
    assert written({"type": "object"}, *texts) == [*texts]
    assert written({"type": "object", "minProperties": 1, "maxProperties": 1}, *texts) == [texts[1], texts[4]]


def test_what_a_schema_demands_is_written_though_it_does_not_name_it():
    assert written(OPEN_PERSON | {"required": ["more"]}, '{"name": "x"}', '{"name": "x", "more": 1}') == [
        '{"name": "x", "more": 1}'
    ]
    three = OPEN_PERSON | {"minProperties": 3, "required": ["name", "age"]}
    assert written(three, '{"name": "x", "age": 1}', '{"name": "x", "age": 1, "more": 1}') == [
        '{"name": "x", "age": 1, "more": 1}'
    ]


def test_properties_of_several_branches_are_written_together():
    both = {"allOf": [OPEN_PERSON, {"properties": {"city": {"const": "x"}}, "required": ["city"]}]}
    texts = ('{"name": "x", "city": "x"}', '{"city": "x"}', '{"name": "x", "city": "x", "more": 1}')
    assert written(both, *texts) == [*texts[:2]]
    either = OPEN_PERSON | {"if": {"required": ["age"]}, "then": {"properties": {"city": {"const": "x"}}}}
    assert written(either, '{"name": "x", "age": 1, "city": "x"}', '{"name": "x", "age": 1, "city": "y"}') == [
        '{"name": "x", "age": 1, "city": "x"}'
    ]


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -12, 1.5, "", 'a"b\\c\n\t\u0001é😀', [], [1, [2]], {}, {"a": {"b": [None, "x"]}, "c": 1}],
)
@pytest.mark.parametrize("schema", ["true", "{}", "$$ANY$$"])
def test_any_value_is_written_as_json_dumps_writes_it(schema, value):
    assert matches(json_schema(schema), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    "text",
    [
        *("", " 1", "1 ", "[1,2]", "[ 1]", "[1 , 2]", "[1, ]", "[1 2]", "[\n]"),
        *("{}{}", "{ }", '{"a":1}', '{"a" : 1}', '{"a": 1,"b": 2}', "{1: 2}"),
        *("nul", "01", "-0", "+1", "1.", ".5", "NaN", "Infinity", "'a'", '"\\u0061"', '"\\/"', '"\u0001"'),
    ],
)
def test_no_other_layout_and_nothing_that_is_not_json(text):
    assert not matches(json_schema("{}"), text)


def test_properties_come_in_the_schemas_order_then_what_is_required_then_free_ones():
    schema = OPEN_PERSON | {"required": ["id", "age"]}
    right = '{"name": "x", "age": 1, "id": 2, "zip": 3, "city": 4}'
    wrong = [
        '{"age": 1, "name": "x", "id": 2}',
        '{"age": 1, "zip": 3, "id": 2}',
        '{"name": "x", "id": 2, "age": 1}',
        '{"zip": 3, "age": 1, "id": 2}',
    ]
    assert accepted(schema, right, '{"age": 1, "id": 2}', *wrong) == [right, '{"age": 1, "id": 2}']


def test_a_free_key_is_never_a_named_one():
    assert accepted(OPEN_PERSON, '{"age": 1, "name": 2}', '{"zip": 1, "age": "x"}', '{"age": 1, "age": 2}') == []


def test_a_named_key_is_compared_by_its_characters_and_not_by_its_escapes():
    schema = {"type": "object", "properties": {'a"\n': {"const": 1}}}
    assert accepted(schema, '{"a\\"\\n": 1}', '{"a\\"\\n": 2}', '{"\\u0061\\"\\n": 2}') == ['{"a\\"\\n": 1}']


def test_a_key_that_is_written_twice_never_makes_an_invalid_value_valid():
    some_number = {"type": "object", "not": {"additionalProperties": {"type": "string"}}}
    assert accepted(some_number, '{"a": 1, "a": "x"}', '{"a": "x", "a": 1}', '{"b": "x", "a": 1}') == [
        '{"a": "x", "a": 1}',
        '{"b": "x", "a": 1}',
    ]
    two = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2}
    assert accepted(two, '{"a": 1, "a": 2}', '{"a": 1}', '{"a": 1, "b": 2}') == ['{"a": 1, "b": 2}']


def test_optional_properties_have_their_commas_in_every_combination():
    schema = {"properties": {key: {"const": 0} for key in "abcd"}, "required": ["c"], "additionalProperties": False}
    schema["type"] = "object"
    for mask in range(16):
        keys = [key for bit, key in enumerate("abcd") if mask >> bit & 1]
        text = json.dumps(dict.fromkeys(keys, 0))
        assert bool(accepted(schema, text)) == ("c" in keys), text
    assert accepted(schema, '{, "c": 0}', '{"c": 0, }', '{"a": 0"c": 0}') == []


def test_numbers_that_are_equal_are_equal_in_const_and_enum():
    assert accepted({"const": 1.0}, "1", "1.0", "true") == ["1"]
    assert accepted({"enum": [[False], {"a": 0}]}, "[false]", "[0]", '{"a": 0}', '{"a": false}') == [
        "[false]",
        '{"a": 0}',
    ]


def test_a_recursive_schema_is_as_deep_as_one_likes():
    tree = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["value"],
        "additionalProperties": False,
    }
    text, wrong = '{"value": 0}', '{"value": "0"}'
    for _ in range(5):
        text, wrong = (f'{{"value": 1, "children": [{inner}, {inner}]}}' for inner in (text, wrong))
    assert accepted(tree, text, wrong) == [text]


def test_recursive_schemas_are_intersected_and_complemented():
    lists = {
        "$defs": {
            "numbers": {"type": ["array", "integer"], "items": {"$ref": "#/$defs/numbers"}},
            "short": {"maxItems": 2, "items": {"$ref": "#/$defs/short"}},
        }
    }
    both = lists | {"allOf": [{"$ref": "#/$defs/numbers"}, {"$ref": "#/$defs/short"}]}
    assert accepted(both, "[1, [2, [3, []]]]", "[1, [2, [1, 2, 3]]]", "[[[null]]]") == ["[1, [2, [3, []]]]"]
    outside = lists | {"allOf": [{"$ref": "#/$defs/numbers"}, {"not": {"$ref": "#/$defs/short"}}]}
    assert accepted(outside, "[1, [2, [3, []]]]", "[1, [2, [1, 2, 3]]]", "[[[null]]]", "1") == ["[1, [2, [1, 2, 3]]]"]


def test_branches_that_a_constant_tells_apart_need_no_complement():
    def branch(kind):
        return {"properties": {"kind": {"const": kind}, kind: {"type": "string"}, "n": {}}, "required": ["kind", kind]}

    branches = [branch(f"k{i}") for i in range(30)]
    one = json_schema(json.dumps({"type": "object", "oneOf": branches}))
    assert one == json_schema(json.dumps({"type": "object", "anyOf": branches}))
    assert matches(one, '{"kind": "k7", "k7": "x", "n": 1}')
    assert not matches(one, '{"kind": "k7", "k8": "x", "n": 1}')


def test_a_discriminator_keeps_branches_apart_whose_constants_are_optional():
    def branch(kind):
        return {"properties": {"kind": {"const": kind}, **{f"{kind}{i}": {"type": "string"} for i in range(5)}}}

    branches = {"oneOf": [branch(f"k{i}") for i in range(20)]}
    told = branches | {"discriminator": {"propertyName": "kind"}}
    assert accepted(
        told, '{"kind": "k3", "k30": "x", "k40": 1}', '{"kind": "k3", "k30": 1}', "{}", '{"kind": "k"}'
    ) == ['{"kind": "k3", "k30": "x", "k40": 1}']


def test_what_is_not_evaluated_may_refer_to_the_schema_itself():
    schema = {"type": ["object", "null"], "properties": {"a": {"const": 1}}, "unevaluatedProperties": {"$ref": "#"}}
    assert accepted(schema, '{"a": 1, "b": {"a": 1, "c": null}}', '{"b": {"a": 2}}', '{"b": 1}') == [
        '{"a": 1, "b": {"a": 1, "c": null}}'
    ]


def test_what_no_finite_value_leads_out_of_is_left_out():
    endless = {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}},
    }
    schema = {"type": "object", "properties": {"a": endless, "b": {"type": "null"}}, "additionalProperties": False}
    schema["$defs"] = endless.pop("$defs")
    language = json_schema(json.dumps(schema))
    assert matches(language, '{"b": null}')
    assert '"a"' not in str(language)


def test_a_language_grows_with_its_schema_and_not_faster():
    def size(count):
        properties = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(count)}
        schema = {
            "type": "object",
            "properties": properties,
            "$defs": {"x": OPEN_PERSON},
            "additionalProperties": False,
        }
        return len(str(json_schema(json.dumps(schema))))

    assert size(400) - size(200) < 1.2 * (size(200) - size(0))


def test_languages_of_several_schemas_have_rules_of_their_own():
    first, second = (json_schema(json.dumps({"items": {"const": value}}), f"{value}-") for value in (1, 2))
    assert not first.rules.keys() & second.rules.keys()
    both = Language(first.start, {**first.rules, **second.rules})
    assert matches(both, "[1, 1]")
    assert not matches(both, "[2]")


def test_every_lexeme_of_a_property_name_holds_its_colon():
    # A key's terminal must not be the beginning of another one's, so all of them end alike.
    language = json_schema(json.dumps(OPEN_PERSON))
    keys = [
        part for rule in language.rules.values() for part in terminals(rule) if "Text(text='\"name\": ')" in str(part)
    ]
    assert keys
    assert not [
        part for rule in language.rules.values() for part in terminals(rule) if str(part.item) == "Text(text=': ')"
    ]


def terminals(expression):
    if isinstance(expression, Terminal):
        yield expression
    elif not isinstance(expression, RuleCall):
        inner = getattr(expression, "items", None) or ([expression.item] if hasattr(expression, "item") else [])
        for part in inner:
            yield from terminals(part)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}, '["b", 1, "a"]', '["a", 1, "a"]'),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, "[false, true]", "[true, true]"),
        (
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 4},
                "uniqueItems": True,
                "minItems": 2,
            },
            "[4, 1]",
            "[2, 2]",
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer"}],
                "items": False,
                "uniqueItems": True,
            },
            '["a", 1]',
            "[1, 1]",
        ),
    ],
)
def test_items_are_kept_different_where_there_are_few_values(schema, right, wrong):
    assert accepted(schema, right, wrong) == [right]


def test_formats_are_enforced():
    assert accepted({"format": "date"}, '"2024-02-28"', '"2024-13-01"', '"today"', "1") == ['"2024-02-28"', "1"]


def test_schemas_without_a_draft_may_use_both_names_for_definitions():
    for name in ("$defs", "definitions"):
        assert accepted({"$ref": f"#/{name}/x", name: {"x": {"type": "null"}}}, "null", "1") == ["null"]


def test_free_keys_that_are_demanded_are_counted_and_a_guard_keeps_them_different():
    three = {"type": "object", "minProperties": 3, "additionalProperties": {"const": 0}}
    texts = ('{"a": 0, "b": 0, "c": 0}', '{"a": 0, "b": 0, "a": 0}', '{"a": 0, "ab": 0, "": 0}')
    assert accepted(three, *texts, '{"a": 0, "b": 0}') == [*texts]
    some = three | {"properties": {"x": {"const": 1}}, "maxProperties": 4}
    texts = ('{"x": 1, "b": 0, "c": 0}', '{"x": 1, "b": 0, "c": 0, "": 0}', '{"x": 1, "x": 0, "c": 0}', '{"x": 1}')
    assert accepted(some, *texts) == [*texts[:2]]
    for schema in (three, some):
        assert [item.keyword for item in json_schema(json.dumps(schema)).unenforced] == ["minProperties"]
        assert json_schema(json.dumps(schema), guards=True).unenforced == ()
