"""Within tags and the calls of tools what no grammar can enforce is enforced, too: judged by jsonschema."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from exact_masks import allowed, check_exact
from samples import either

from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar, language_of
from tureen.grammar.guard.guarded import GuardedCompiled
from tureen.kernels.cpu import native
from tureen.text.messages import CallArguments, CallStart, Tool
from tureen.text.tools import FORMATS

BYTES = tuple(bytes([byte]) for byte in range(256))
LONG = (
    b'"a"', b'"b"', b'", "', b'"]', b'"a", "a"', b'"a", "b"', b"1, 1", b", 1", b'": ', b'", "a', b"], [", b"14", b"[]",
    b'"]}', b"]\n", b": [", b'>["a", "a"', b'e>["a"', b'"]</', b"</a><a>", b"s>{}", b">{}", b'": ["a", "a"',
)  # fmt: skip
VOCABULARIES = {
    "bytes": Vocabulary(BYTES, (256,), 257),
    "long": Vocabulary((*BYTES, *LONG), (256 + len(LONG),), 257 + len(LONG)),
}
LIKELY = (*(bytes([byte]) for byte in b'ab",]}17 :.<\n'), *LONG)
MAX_TOKENS = 900
LETTERS = {
    "type": "array",
    "items": {"type": "string", "maxLength": 1},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 3,
}
SEVENS = {"type": "array", "items": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}, "minItems": 1,
          "maxItems": 2}  # fmt: skip


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ARGUMENTS = {
    "tags": an_object(tags=LETTERS),
    "mixed": an_object(word={"enum": ["a", "[", "b"]}, tags={**LETTERS, "type": ["array", "string"], "maxLength": 2}),
    "numbers": an_object(sevens=SEVENS, one={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}),
    "objects": an_object(keys={"type": "object", "additionalProperties": {"const": 1}, "minProperties": 2,
                               "maxProperties": 3, "propertyNames": {"maxLength": 2}}),
    "nothing guarded": an_object(flag={"type": "boolean"}),
}  # fmt: skip
SCHEMAS = {f"call{number}": schema for number, schema in enumerate(ARGUMENTS.values())}
TOOLS = [Tool(name=name, description="", parameters=schema) for name, schema in SCHEMAS.items()]
NAMES = [form.NAMES[0] for form in FORMATS]


def spec(layout: Any, *, strict: bool = True, after: str = "") -> GrammarSpec:
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": layout}), after, strict)


def compiled(constraint: GrammarSpec, vocabulary: Vocabulary) -> Any:
    return compile_grammar(constraint, LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require()))


def written(grammar: Any, vocabulary: Vocabulary, dice: random.Random, begins: list[str]) -> str:
    """A text that a model writes with random wishes, and now and then a wish to begin a tag."""
    text, wish, count = b"", dice.choice(begins).encode(), 0
    [end] = vocabulary.eos_token_ids
    while count < MAX_TOKENS:
        count += 1
        tokens = allowed(grammar, vocabulary)
        assert tokens, f"nothing can follow {text!r}"
        if end in tokens and (tokens == [end] or (count > 120 and dice.random() < 0.2)):
            return text.decode()
        others = [token for token in tokens if token != end]
        if not wish and dice.random() < 0.2:
            wish = dice.choice(begins).encode()
        likely = [token for token in others if vocabulary.tokens[token] in LIKELY]
        token = wish[0] if wish and wish[0] in others else dice.choice(likely or others)
        wish = wish[1:] if wish and token == wish[0] else b""
        assert grammar.accept(token)
        text += vocabulary.tokens[token]
        for forced in grammar.forced() if dice.random() < 0.5 else ():
            assert grammar.accept(forced), (text, vocabulary.tokens[forced])
            text, wish = text + vocabulary.tokens[forced], b""
        if grammar.is_done:
            return text.decode()
    raise AssertionError(f"it does not come to an end: {text!r}")


def layout_of(name: str, *, required: bool, tools: list[Tool] = TOOLS) -> Any:
    form = next(form for form in FORMATS if name in form.NAMES)
    return form.structural_tag(tools, required=required, parallel=True)


def calls_in(name: str, text: str) -> list[tuple[str, Any]]:
    parser = next(form for form in FORMATS if name in form.NAMES).parser(TOOLS)
    calls: list[tuple[str, str]] = []
    for part in (*parser.feed(text), *parser.close()):
        if isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.text)
    return [(tool, json.loads(arguments)) for tool, arguments in calls]


@pytest.mark.sampled
@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_strict_tools_are_valid_whatever_the_model_wishes(name, required):
    enough = either(10**6, 2)
    layout = layout_of(name, required=required)
    language = language_of(spec(layout))
    assert language.unenforced == ()
    assert language.guard is not None
    vocabulary = VOCABULARIES["long"]
    grammar = compiled(spec(layout), vocabulary)
    assert isinstance(grammar, GuardedCompiled)
    outer = (
        [] if required else [tag["begin"] for tag in layout.get("tags", ())]
    )  # calls in a block follow by themselves
    begins = outer or [json.loads(text) for text in re.findall(r'"begin": ("(?:[^"\\]|\\.)*")', json.dumps(layout))]
    head = "<|channel|>commentary " if name == "gpt-oss" and not required else ""
    wishes = sorted({head + begin for begin in begins if begin})
    count = 0
    for seed in range(10):
        text = written(grammar.start(), vocabulary, random.Random(f"{name}{seed}"), wishes)
        calls = calls_in(name, text)
        count += len(calls)
        for tool, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[tool])
        if count >= enough:
            break
    assert count


def tag(begin: str, schema: Any, end: str, **options: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": begin,
        "content": {"type": "json_schema", "json_schema": schema, **options},
        "end": end,
    }


def few(items: list[Any], most: int) -> tuple[Any, list[str]]:
    """A schema of different items, and all texts of its values."""
    schema = {"type": "array", "items": {"enum": items}, "uniqueItems": True, "maxItems": most}
    chosen = itertools.chain(*(itertools.permutations(items, count) for count in range(most + 1)))
    return schema, [json.dumps(list(some)) for some in chosen]


FEW, TEXTS = few(["a", "b", "c", "d", "e", "ab", "aa", "ac", "ba"], 2)


def in_tag(begin: str, end: str) -> list[str]:
    return [begin + text + end for text in TEXTS]


LAYOUTS: dict[str, tuple[Any, list[str]]] = {
    "a tag": (tag("<a>", FEW, "</a>"), in_tag("<a>", "</a>")),
    "several ends": (tag("<a>", FEW, ["</a>", "</b>"]), [*in_tag("<a>", "</a>"), *in_tag("<a>", "</b>")]),
    "no end": (tag("a: ", FEW, ""), in_tag("a: ", "")),
    "a sequence": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, tag("<a>", FEW, ""),
                                          {"type": "optional", "content": {"type": "const_string", "value": "yz"}}]},
        [*in_tag("x<a>", ""), *in_tag("x<a>", "yz")],
    ),
    "one of several": (
        {"type": "or", "elements": [tag("<a>", FEW, "</a>"), tag("<ab>", {"const": [1, 1]}, ""),
                                    {"type": "regex", "pattern": "[xyz]{1,2}"}]},
        [*in_tag("<a>", "</a>"), "<ab>[1, 1]", *map("".join, itertools.product("xyz")),
         *map("".join, itertools.product("xyz", repeat=2))],
    ),
    "in each other": (
        {"type": "tag", "begin": "<o>", "end": "</o>", "content": tag("<a>", FEW, "</a>")},
        in_tag("<o><a>", "</a></o>"),
    ),
    "parameters": (tag("", an_object(p=FEW), "$", style="minimax_xml"),
                   [f'<parameter name="p">{text}</parameter>{gap}$' for text in TEXTS for gap in ("", "\n")]
                   + [f'\n<parameter name="p">{text}</parameter>{gap}$' for text in TEXTS for gap in ("", "\n")]),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_token_is_allowed_exactly_where_a_right_text_goes_on_with_it(name, size):
    layout, right = LAYOUTS[name]
    vocabulary, dice = VOCABULARIES[size], random.Random(name)
    texts = [text.encode() for text in right]
    grammar = compiled(spec(layout), vocabulary)
    assert isinstance(grammar, GuardedCompiled)
    check_exact(grammar, vocabulary, texts, dice, times=either(4, 2))


TAG = tag("<a>", LETTERS, "</a>")
TRIGGERED = {
    "triggered": {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG, tag("<ab>", LETTERS, "")]},
    "at least one": {"type": "triggered_tags", "triggers": ["<a"], "at_least_one": True, "tags": [TAG]},
    "within a tag": {"type": "tag", "begin": "<o>", "end": "</o>", "content": {
        "type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}},
    "dispatch": {"type": "dispatch", "rules": [["<a>", {"type": "json_schema", "json_schema": LETTERS}]]},
    "repeated": {"type": "plus", "content": TAG},
    "separated": {"type": "tags_with_separator", "separator": "\n", "tags": [TAG]},
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("name", TRIGGERED)
def test_values_between_free_texts_are_valid(name, size):
    vocabulary, count, enough = VOCABULARIES[size], 0, either(10**6, 2)
    grammar = compiled(spec(TRIGGERED[name]), vocabulary)
    for seed in range(10):
        text = written(grammar.start(), vocabulary, random.Random(seed), ["<a>", "<ab>", "<o>", "</o>"])
        for match in re.finditer("<ab?>" if name == "triggered" else "<a>", text):
            value, _ = json.JSONDecoder().raw_decode(text, match.end())
            jsonschema.validate(value, LETTERS)
            count += 1
        if count >= enough:
            break
    assert count


def test_tags_may_come_after_a_marker():
    vocabulary = VOCABULARIES["bytes"]
    place = compiled(spec(TAG, after="</think>"), vocabulary).start()
    for byte in b'<a>["a", "a"]</think><a>["a", "':
        assert place.accept(byte), chr(byte)
    assert place.accept(ord("b"))
    place.rollback(1)
    assert place.accept(ord("a")) is False or ord('"') not in allowed(place, vocabulary)


def test_the_older_form_is_guarded_too():
    text = json.dumps({"structures": [{"begin": "<a>", "schema": LETTERS, "end": "</a>"}], "triggers": ["<a>"]})
    vocabulary = VOCABULARIES["bytes"]
    grammar = compiled(GrammarSpec("structural_tag", text, strict=True), vocabulary)
    place = grammar.start()
    for byte in b'so: <a>["a", "b"]</a> and <a>["b", "':
        assert place.accept(byte), chr(byte)
    assert not place.accept(ord("b")) or ord('"') not in allowed(place, vocabulary)


ANY_ARRAY = {"type": "json_schema", "json_schema": {"type": "array"}}
UNTOLD = {
    "a value that may be free text": {"type": "or", "elements": [{"type": "json_schema", "json_schema": LETTERS},
                                                                 {"type": "regex", "pattern": ".*"}]},
    "two values that begin alike": {"type": "or", "elements": [{"type": "json_schema", "json_schema": LETTERS},
                                                               ANY_ARRAY]},
    "free text without an end before it": {"type": "sequence", "elements": [
        {"type": "regex", "pattern": "[a-z]*"}, {"type": "json_schema", "json_schema": LETTERS}]},
}  # fmt: skip


@pytest.mark.parametrize("name", UNTOLD)
def test_where_a_value_is_not_surely_found_it_is_told_and_strict_refuses_it(name):
    language = language_of(spec(UNTOLD[name], strict=False))
    assert [item.keyword for item in language.unenforced] == ["uniqueItems"]
    assert language.guard is None
    with pytest.raises(GrammarError, match="uniqueItems"):
        language_of(spec(UNTOLD[name]))


def test_a_tag_without_such_keywords_has_no_guard():
    assert not isinstance(
        compiled(spec(tag("<a>", {"type": "boolean"}, "</a>")), VOCABULARIES["bytes"]), GuardedCompiled
    )
