"""A guard keeps to what holds for a value only under conditions: judged by jsonschema over all texts of small
languages."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from exact_masks import allowed, check_exact
from real_schemas import corpus
from samples import either

from tureen.grammar import (
    GrammarError,
    GrammarSpec,
    LanguageCompiler,
    TooComplex,
    Vocabulary,
    compile_grammar,
    frontends,
)
from tureen.grammar.frontends import language_of, translate
from tureen.grammar.guard.guarded import GuardedCompiled, load_guarded
from tureen.grammar.schema import write_arrays
from tureen.kernels.cpu import native

BYTES = tuple(bytes([byte]) for byte in range(256))
LONG = (
    b"[[1], ", b"[1]", b"[2]", b"[3]", b"1], [1", b"2], [", b"]]", b"], [", b'": ', b'": [', b'"a": [', b'"b": [',
    b'"u"', b'"n"', b'": "', b'"t": ', b"true", b", ", b"]]}", b"]}", b'], "', b'{"', b"[[", b"]], [[",
    b'"u", "tags": [[1]',
    b"1]], ", b'"}', b"[{", b"}, {", b"}]",
)  # fmt: skip
VOCABULARIES = {
    "bytes": Vocabulary(BYTES, (256,), 257),
    "long": Vocabulary((*BYTES, *LONG), (256 + len(LONG),), 257 + len(LONG)),
}
MAX_TEXTS = 60_000


def lists(*values: int, **keywords: Any) -> dict[str, Any]:
    """Short arrays of these numbers, each in an array: such no grammar tells apart."""
    return {"type": "array", "items": {"enum": [[value] for value in values]}, "maxItems": 2, **keywords}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def few_keys(*keys: str, maxProperties: int = 1, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"enum": list(keys)}, "maxProperties": maxProperties, **keywords}


ANY, DIFFERENT = lists(1, 2), lists(1, 2, uniqueItems=True)
SMALL: dict[str, Any] = {
    "one pattern": few_keys("a", "ab", "b", patternProperties={"^a": DIFFERENT}, additionalProperties=False),
    "a pattern and others": few_keys("a", "ab", "b", patternProperties={"^a": DIFFERENT}, additionalProperties=ANY),
    "several patterns": few_keys(
        "a", "ab", "b", "c", patternProperties={"^a": DIFFERENT, "b$": ANY, "^c": lists(3, 1, uniqueItems=True)},
        additionalProperties=False,
    ),
    "a pattern beside names": few_keys(
        "a", "b", "c", properties={"a": ANY, "b": ANY}, patternProperties={"^[bc]$": DIFFERENT},
        additionalProperties=ANY,
    ),
    "one of two arrays": {"anyOf": [DIFFERENT, lists(2, 3, minItems=2)]},
    "arrays that begin alike": {"anyOf": [lists(1, 2, uniqueItems=True, minItems=1), lists(1, 3, minItems=2)]},
    "a kind before": {"oneOf": [an_object(t={"const": "u"}, tags=DIFFERENT), an_object(t={"const": "n"}, tags=ANY)]},
    "a kind behind": {"oneOf": [an_object(tags=DIFFERENT, t={"const": "u"}), an_object(tags=ANY, t={"const": "n"})]},
    "kinds that begin alike": {
        "oneOf": [an_object(tags=DIFFERENT, t={"enum": ["aa", "ab"]}), an_object(tags=ANY, t={"enum": ["ac", "b"]})]
    },
    "a key more": {"anyOf": [an_object(tags=ANY, t={"const": 1}), an_object(tags=DIFFERENT)]},
    "a condition": {
        **an_object(t={"type": "boolean"}, tags=ANY),
        "if": {"properties": {"t": {"const": True}}}, "then": {"properties": {"tags": {"uniqueItems": True}}},
    },
    "a condition behind": {
        **an_object(tags=ANY, t={"type": "boolean"}),
        "if": {"properties": {"t": {"const": True}}}, "then": {"properties": {"tags": {"uniqueItems": True}}},
    },
    "a key that asks for it": {
        **an_object(tags=ANY), "properties": {"tags": ANY, "t": {"const": 1}},
        "dependentSchemas": {"t": {"properties": {"tags": {"uniqueItems": True}}}},
    },
    "in each other": {"anyOf": [
        an_object(x={"anyOf": [DIFFERENT, lists(3, 1, minItems=2)]}, t={"const": "u"}),
        an_object(x=lists(1, 3), t={"const": "n"}),
    ]},
    "items": {"type": "array", "maxItems": 2, "items": {"anyOf": [
        lists(1, 2, uniqueItems=True, minItems=2), lists(3, 1, minItems=2)]}},
    "different items that differ inside": {"type": "array", "maxItems": 2, "uniqueItems": True, "items": {"anyOf": [
        lists(1, 2, uniqueItems=True, minItems=2), lists(3, minItems=1)]}},
    "two keys that begin alike": few_keys("a", "ab", "b", additionalProperties={"const": 1}, minProperties=2,
                                          maxProperties=2),
    "all keys there are": few_keys("a", "b", "c", properties={"b": {"const": 1}}, additionalProperties={"const": 2},
                                   minProperties=3, maxProperties=5),
    "keys of patterns": {"type": "object", "patternProperties": {"^(a|ab)$": {"const": 1}, "^b$": DIFFERENT},
                         "additionalProperties": False, "minProperties": 2, "maxProperties": 2},
    "not few keys": few_keys("a", "ab", "b", "", additionalProperties={"const": 1}, maxProperties=3,
                             **{"not": {"maxProperties": 1}}),
    "one must be different": {"type": "object", "properties": {"a": ANY, "b": ANY}, "required": ["a", "b"],
        "additionalProperties": False, "anyOf": [
            {"properties": {"a": {"uniqueItems": True}}}, {"properties": {"b": {"uniqueItems": True}}}]},
}  # fmt: skip


NUMBERS = {"type": "array", "items": {"enum": [1, 12, "a", "ab", [1]]}, "maxItems": 3}
COUNTED: dict[str, Any] = {
    "one at least": {**NUMBERS, "contains": {"type": "string"}},
    "two at least": {**NUMBERS, "contains": {"type": "string"}, "minContains": 2},
    "one at most": {**NUMBERS, "contains": {"type": "integer"}, "minContains": 0, "maxContains": 1},
    "none": {**NUMBERS, "contains": {"enum": [1, "a"]}, "minContains": 0, "maxContains": 0},
    "just two": {**NUMBERS, "contains": {"enum": [1, "ab", [1]]}, "minContains": 2, "maxContains": 2},
    "by place": {**NUMBERS, "prefixItems": [{"enum": [1, "b"]}, {"enum": ["c", 2]}], "maxItems": 4, "minItems": 2,
                 "contains": {"type": "string"}, "minContains": 2, "maxContains": 2},
    "at the first places only": {"type": "array", "prefixItems": [{"enum": [1, "b"]}, {"enum": ["c", 2]}],
                                 "items": {"const": 3}, "maxItems": 3, "contains": {"type": "string"}},
    "different ones": {**NUMBERS, "items": {"enum": [[1], [2], [3]]}, "uniqueItems": True,
                       "contains": {"const": [2]}},
    "arrays": {**NUMBERS, "items": {"enum": [[1], [2], [1, 2]]}, "contains": {"minItems": 2}},
    "by a condition": {"anyOf": [{**NUMBERS, "contains": {"const": 12}, "maxItems": 2},
                                 {"type": "array", "minItems": 1, "maxItems": 2, "items": {"const": "a"}}]},
}  # fmt: skip
SMALL |= COUNTED


def spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@cache
def backend(size: str) -> Any:
    return LanguageCompiler(VOCABULARIES[size], lambda text: list(text.encode()), native.require())


@cache
def valid_texts(name: str) -> list[bytes]:
    """The texts that the grammar alone allows, of which jsonschema finds the values valid."""
    validator = jsonschema.Draft202012Validator(SMALL[name])
    language = language_of(spec(SMALL[name]))
    grammar = backend("bytes").load(backend("bytes").translate(language)).start()
    texts, waiting, text = [], [(0, -1)], b""
    while waiting:
        size, token = waiting.pop()
        grammar.rollback(len(text) - size)
        text = text[:size]
        if token >= 0:
            assert grammar.accept(token)
            text += bytes([token])
        following = allowed(grammar, VOCABULARIES["bytes"])
        if 256 in following:
            texts.append(text)
            assert len(texts) < MAX_TEXTS
        waiting += [(len(text), token) for token in following if token < 256]
    return [text for text in texts if (value := read(text)) is not None and validator.is_valid(value)]


def read(text: bytes) -> Any:
    """The value; None where a key comes twice, which a guard that counts keys does not write."""
    is_right = True

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_right
        is_right = is_right and len(dict(pairs)) == len(pairs)
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=object_of)
    return value if is_right else None


@pytest.fixture(autouse=True)
def no_states(monkeypatch):
    """No grammar counts items: a guard has to."""
    monkeypatch.setattr(write_arrays, "MAX_STATES", 0)


@pytest.mark.sampled
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("name", SMALL)
def test_a_token_is_allowed_exactly_where_a_valid_text_goes_on_with_it(name, size):
    assert language_of(spec(SMALL[name])).unenforced == ()
    vocabulary, texts, dice = VOCABULARIES[size], valid_texts(name), random.Random(name)
    grammar = compile_grammar(spec(SMALL[name]), backend(size))
    assert isinstance(grammar, GuardedCompiled)
    check_exact(grammar, vocabulary, texts, dice, times=either(12, 2))


@pytest.mark.parametrize("name", ["a kind before", "one at least"])
def test_conditions_are_kept_with_a_vocabulary_that_has_no_token_for_some_bytes(name):
    pieces = tuple(b"" if byte in {0, 0xF1, 0xF2} else bytes([byte]) for byte in range(256))
    vocabulary = Vocabulary(pieces, (256,), 257)
    languages = LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())
    language = language_of(spec(SMALL[name]))
    grammar = load_guarded(languages.translate(language), language.guard, languages)
    check_exact(grammar, vocabulary, valid_texts(name), random.Random(name), times=2)


def test_branches_add_little_to_the_program_of_their_language():
    languages = backend("bytes")
    language = language_of(
        GrammarSpec("json_schema", corpus()["asyncapi-specs/package_schemas_1.1.0-without-_id.json"])
    )
    sizes = [
        languages.load(languages.translate(one)).follower.num_instructions
        for one in (language, replace(language, branches=()))
    ]
    assert len(language.branches) == 2
    assert sizes[0] < 1.01 * sizes[1]


def test_branches_that_need_many_states_together_are_seldom_followed_again_from_the_beginning():
    numbers = {"type": "array", "items": {"type": "integer"}}
    kinds = range(6)
    variants = [
        {
            "type": "object", "required": ["s", "t"], "additionalProperties": False,
            "properties": {
                **{f"p{other}": {**numbers, "uniqueItems": other == kind} for other in kinds},
                "s": {"type": "string", "maxLength": 5_000 + kind},
                "t": {"const": kind},
            },
        }
        for kind in kinds
    ]  # fmt: skip
    grammar = compile_grammar(spec({"anyOf": variants}), backend("bytes"))
    place, kept = grammar.start(), []
    for byte in b'{"p1": [1, 2], "s": "' + 3_800 * b"a":
        assert byte in allowed(place, VOCABULARIES["bytes"])
        kept.append(grammar._inner.follower.num_kept)
        assert place.accept(byte)
        kept.append(grammar._inner.follower.num_kept)
    assert grammar._inner.follower.num_branches == 6
    assert sum(after < before for before, after in pairwise(kept)) == 1


TOO_LARGE = {
    "type": "array", "items": {"type": "string"},
    "contains": {"pattern": "a[ab]{17}$"}, "minContains": 2_000, "maxContains": 9_000,
}  # fmt: skip
"""Counting its items needs an automaton of 2 ** 18 states, which the language without a guard does not."""


def test_branches_that_are_too_large_are_listed_as_unenforced_or_refused_and_the_rest_stays_guarded():
    languages = backend("bytes")
    asked = spec(an_object(tags=DIFFERENT, many=TOO_LARGE))
    language, program = translate(language_of(asked), asked, languages)
    assert list(map(str, language.unenforced)) == ["contains at /many"]
    place = load_guarded(program, language.guard, languages).start()
    assert all(map(place.accept, b'{"tags": [[1], ['))
    assert ord("1") not in allowed(place, VOCABULARIES["bytes"])
    strict = GrammarSpec("json_schema", asked.text, strict=True)
    with pytest.raises(GrammarError, match=r'^"contains" .* \(at \'#/properties/many\'\)$'):
        translate(language_of(strict), strict, languages)


LATE = {"anyOf": [lists(1, 2, uniqueItems=True), lists(1, 3, minItems=2)]}
"""Only branches tell which of the two an array is that begins with [1]."""


def test_a_branch_that_is_too_large_costs_no_other_value_its_guard():
    languages = backend("bytes")
    asked = spec(an_object(a=LATE, b=LATE, many=TOO_LARGE))
    language, program = translate(language_of(asked), asked, languages)
    assert list(map(str, language.unenforced)) == ["contains at /many"]
    assert sorted(map(str, language.guarded)) == ["uniqueItems at /a", "uniqueItems at /b"]
    place = load_guarded(program, language.guard, languages).start()
    for key, before in ("a", b"{"), ("b", b", "):
        assert all(map(place.accept, before + f'"{key}": [[2], ['.encode()))
        assert allowed(place, VOCABULARIES["bytes"]) == [ord("1")]
        assert all(map(place.accept, b"1]]"))


def test_a_tag_whose_branches_are_too_large_costs_no_other_tag_its_guard():
    languages = backend("bytes")

    def tag(name, schema, *, strict):
        content = {"type": "json_schema", "json_schema": schema, "strict": strict}
        return {"type": "tag", "begin": f"<{name}>", "content": content, "end": f"</{name}>"}

    def asked(*, strict):
        tags = [tag("a", LATE, strict=True), tag("b", TOO_LARGE, strict=strict)]
        form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
        return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))

    language, program = translate(language_of(asked(strict=False)), asked(strict=False), languages)
    assert list(map(str, language.unenforced)) == ["contains at the root"]
    place = load_guarded(program, language.guard, languages).start()
    assert all(map(place.accept, b"a <a>[[2], ["))
    assert allowed(place, VOCABULARIES["bytes"]) == [ord("1")]
    with pytest.raises(GrammarError, match=r'^structural_tag.format.tags\[1\].content.json_schema: "contains"'):
        translate(language_of(asked(strict=True)), asked(strict=True), languages)


def test_a_keyword_whose_branches_are_too_large_is_refused_for_this_reason():
    languages = backend("bytes")
    reason = "cannot be enforced: the alternatives that it depends on need too large an automaton, alone or with others"
    asked = GrammarSpec("json_schema", json.dumps(an_object(many=TOO_LARGE)), strict=True)
    with pytest.raises(GrammarError) as refused:
        translate(language_of(asked), asked, languages)
    way_out = 'Simplify the schema or leave "strict" out'
    assert str(refused.value) == f"\"contains\" {reason}. {way_out} (at '#/properties/many')"
    asked = spec(an_object(many=TOO_LARGE))
    [left_out] = translate(language_of(asked), asked, languages)[0].unenforced
    assert left_out.why == f"\"contains\" {reason}. Simplify the schema (at '#/properties/many')"


def test_a_language_that_is_too_large_without_its_branches_is_refused_for_this_reason():
    languages = backend("bytes")
    word = {"type": "string", "pattern": "^(?!.*a[ab]{17}b)[a-z]*$"}
    asked = GrammarSpec("json_schema", json.dumps(an_object(a=LATE, word=word)), strict=True)
    with pytest.raises(GrammarError, match=r"^an automaton has too many states$"):
        translate(language_of(asked), asked, languages)


@pytest.fixture
def tried(monkeypatch):
    """The languages that are compiled, in order."""
    languages, tried = backend("bytes"), []
    translated = languages.translate

    def noting(language):
        tried.append(language)
        return translated(language)

    monkeypatch.setattr(languages, "translate", noting)
    return tried


def test_only_few_branches_that_do_not_compile_are_tried(tried):
    many = [{**TOO_LARGE, "contains": {"pattern": f"a[a{letter}]{{17}}$"}} for letter in "bcdefghi"]
    asked = spec(an_object(**{f"k{number}": value for number, value in enumerate(many)}))
    assert len(translate(language_of(asked), asked, backend("bytes"))[0].unenforced) == len(many)
    assert len(tried) == 2 + 2 * 4 + 1  # the whole with its branches and without, two branches of four values


def test_only_so_much_is_compiled_for_branches_alone(tried, monkeypatch):
    monkeypatch.setattr(frontends, "MAX_BRANCH_BYTES", 100)
    asked = spec(an_object(many=TOO_LARGE, a=LATE))
    language, _ = translate(language_of(asked), asked, backend("bytes"))
    assert sorted(map(str, language.unenforced)) == ["contains at /many", "uniqueItems at /a"]
    assert len(tried) == 2 + 1 + 1


def test_branches_that_are_too_large_only_together_are_not_followed(monkeypatch):
    languages, asked = backend("bytes"), spec(an_object(a=LATE, b=DIFFERENT))
    translated = languages.translate

    def limited(language):
        if language.branches:
            raise TooComplex("too many instructions")
        return translated(language)

    monkeypatch.setattr(languages, "translate", limited)
    language, _ = translate(language_of(asked), asked, languages)
    assert list(map(str, language.unenforced)) == ["uniqueItems at /a"]
    assert list(map(str, language.guarded)) == ["uniqueItems at /b"]


ENDLESS = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/endless"}}


def test_a_value_of_which_one_alternative_is_left_needs_no_branch():
    schema = {"$defs": {"endless": ENDLESS}, "anyOf": [DIFFERENT, {"$ref": "#/$defs/endless"}]}
    language = language_of(spec(schema))
    assert (language.branches, list(map(str, language.guarded))) == ((), ["uniqueItems at the root"])
    place = compile_grammar(spec(schema), backend("bytes")).start()
    assert all(map(place.accept, b"[[2], ["))
    assert allowed(place, VOCABULARIES["bytes"]) == [ord("1")]


def test_tags_whose_branches_are_too_large_keep_their_other_promises():
    languages = backend("bytes")
    few = {"type": "tag", "begin": "<", "content": {"type": "any_text", "max_tokens": 2}, "end": ">"}
    value = {"type": "json_schema", "json_schema": TOO_LARGE}

    def asked(*elements, strict=False):
        form = {"type": "sequence", "elements": [*elements, {"type": "const_string", "value": "."}]}
        return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}), strict=strict)

    place = compile_grammar(asked(few, value), languages).start()
    assert all(map(place.accept, b"<ab"))
    assert allowed(place, VOCABULARIES["bytes"]) == [ord(">")]
    free = asked({**value, "strict": False}, strict=True)
    assert [item.keyword for item in translate(language_of(free), free, languages)[0].unenforced] == ["contains"]
    for refused in (asked({**value, "strict": True}), asked(value, strict=True)):
        with pytest.raises(GrammarError, match=r'^structural_tag.format.elements\[0\].json_schema: "contains"'):
            translate(language_of(refused), refused, languages)


NESTED: dict[str, Any] = {
    "$defs": {
        "value": {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#/$defs/value"}, "uniqueItems": True, "maxItems": 2},
                {"type": "array", "items": {"$ref": "#/$defs/value"}, "minItems": 1, "maxItems": 3},
                {"enum": [1, 2]},
            ]
        }
    },
    "$ref": "#/$defs/value",
}


@pytest.mark.parametrize("size", VOCABULARIES)
def test_values_within_each_other_stay_few_things_and_every_text_is_valid(size):
    vocabulary, dice = VOCABULARIES[size], random.Random(7)
    validator = jsonschema.Draft202012Validator(NESTED)
    compiled = compile_grammar(spec(NESTED), backend(size))
    [end] = vocabulary.eos_token_ids
    for depth in (3, 12, 30):
        grammar, text, most = compiled.start(), b"[" * depth, 0
        for byte in text:
            assert grammar.accept(byte)
            most = max(most, grammar.num_places)
        while True:
            tokens = allowed(grammar, vocabulary)
            assert tokens, text
            ending = [token for token in tokens if token == end or not {*vocabulary.tokens[token]} & {*b"[{"}]
            token = dice.choice(ending if ending and dice.random() < 0.8 else tokens)
            if token == end:
                break
            assert grammar.accept(token)
            text += vocabulary.tokens[token]
            most = max(most, grammar.num_places)
        assert validator.is_valid(json.loads(text)), text
        assert most <= native.require().MAX_GUARD_PLACES
