"""Sets of JSON strings against json and re: all short texts, and all short strings."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from matching import matches_expression
from samples import either

from tureen.grammar import regular
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    GrammarError,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.schema.strings import StringSet, encoded, negated

CHARS = ['"', "\\", "/", "\n", "\x01", "\x1f", "\x7f", "é", "😀", "a", "n", "\u2028"]
STRINGS = ["".join(chars) for size in range(4) for chars in itertools.product(CHARS, repeat=size)]
PIECES = ['"', "\\", "/", "n", "u", "0", "1", "f", "F", "é", "\n", "\x01", "b", " "]


def accepted(expression, texts):
    machine = regular.automaton(expression)
    return {text for text in texts if regular.accepts(machine, text)}


def dumps(text):
    return json.dumps(text, ensure_ascii=False)


def decoded(text):
    """The string that a text is the canonical encoding of; None if it is of none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and dumps(value) == text else None


def texts():
    """All texts between quotes of up to four pieces, in the gate three, and all of up to three without."""
    for size in range(either(5, 4)):
        for pieces in itertools.product(PIECES, repeat=size):
            yield '"' + "".join(pieces) + '"'
    for size in range(4):
        for pieces in itertools.product(PIECES, repeat=size):
            yield "".join(pieces)
    for code in range(0x110):
        yield from (f'"\\u{code:04x}"', f'"\\u{code:04X}"', f'"{chr(code)}"', f'"\\{chr(code)}"')


TEXTS = list(dict.fromkeys(texts()))

SETS = {
    "anything": (StringSet.anything(), lambda value: True),
    "nothing": (StringSet.nothing(), lambda value: False),
    "length": (StringSet.of_length(1, 2), lambda value: 1 <= len(value) <= 2),
    "long": (StringSet.of_length(3), lambda value: len(value) >= 3),
    "no length": (StringSet.of_length(2, 1), lambda value: False),
    "pattern": (StringSet.pattern('["/n]'), lambda value: re.search('["/n]', value)),
    "anchored": (StringSet.pattern("^[^a-z]*$"), lambda value: re.fullmatch("[^a-z]*", value)),
    "control": (StringSet.pattern(r"^[\x00-\x20]"), lambda value: re.match("[\x00-\x20]", value)),
    "only": (StringSet.only(['"', "\\n", "\n", "", "é/"]), lambda value: value in ['"', "\\n", "\n", "", "é/"]),
    "not only": (StringSet.only(['"', "\n"]).complement(), lambda value: value not in ['"', "\n"]),
    "not pattern": (StringSet.pattern("n|\\\\").complement(), lambda value: not re.search("n|\\\\", value)),
    "both": (
        StringSet.pattern("^[^0-9]+$").intersect(StringSet.of_length(0, 2)),
        lambda value: 1 <= len(value) <= 2 and not re.search("[0-9]", value),
    ),
    "neither": (
        StringSet.pattern("n").complement().intersect(StringSet.pattern("/").complement()),
        lambda value: "n" not in value and "/" not in value,
    ),
    "minus": (
        StringSet.pattern("^.$").minus(StringSet.pattern('["n]')),
        lambda value: len(value) == 1 and value not in '"n\n\r\u2028\u2029',
    ),
    "union": (
        StringSet.only(["a", '"']).union(StringSet.of_length(3)),
        lambda value: value in ["a", '"'] or len(value) > 2,
    ),
    "not length": (StringSet.of_length(1, 2).complement(), lambda value: len(value) not in (1, 2)),
    "not union": (
        StringSet.only(["a", '"']).union(StringSet.of_length(3)).complement(),
        lambda value: value not in ["a", '"'] and len(value) < 3,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETS)
def test_the_texts_of_a_set_are_the_canonical_encodings_of_its_strings_and_no_others(name):
    strings, is_inside = SETS[name]
    expression = strings.encoded()
    assert isinstance(expression, Terminal)
    inside = {value for value in STRINGS if is_inside(value)}
    assert accepted(expression, map(dumps, STRINGS)) == set(map(dumps, inside))
    wanted = {text for text in TEXTS if decoded(text) is not None and is_inside(decoded(text))}
    assert accepted(expression, TEXTS) == wanted


@pytest.mark.parametrize("name", SETS)
def test_membership_and_emptiness_are_what_the_expression_says(name):
    strings, is_inside = SETS[name]
    for value in STRINGS[:: len(STRINGS) // 50]:
        assert strings.contains(value) == bool(is_inside(value))
        assert strings.contains(value) == matches_expression(strings.expression, value)
    assert strings.among(STRINGS) == tuple(value for value in STRINGS if is_inside(value))
    assert strings.is_empty() == (not any(map(is_inside, STRINGS)))
    assert strings.intersect(strings.complement()).is_empty()
    assert strings.union(strings.complement()).complement().is_empty()


NESTED = {
    "complement inside": Chain((Text("a"), Not(Text('"')))),
    "repeated complement": Repeat(Chain((Not(Choice((Text("a"), Text("\n")))), Text("n"))), 1, 2),
    "intersection inside": Chain((Both(Repeat(ANY_CHAR, 1, 2), Not(Text("\n"))), Text("/"))),
    "two complements": Both(Not(Text("a")), Not(Chain((Text("\\"), ANYTHING)))),
    "intersection of three": Both(Both(Not(Text("a")), ANYTHING), Not(Repeat(Chars(((1, 1), (34, 34)))))),
    "terminal": Terminal(Chars(((0, 34), (92, 97)))),
    "no character": Choice((Chars(()), Text("é"))),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", NESTED)
def test_the_encoding_commutes_with_every_kind_of_node(name):
    inside = {dumps(value) for value in STRINGS if matches_expression(NESTED[name], value)}
    assert accepted(encoded(NESTED[name]), map(dumps, STRINGS)) == inside
    assert {decoded(text) for text in accepted(encoded(NESTED[name]), TEXTS)} == {
        decoded(text) for text in TEXTS if decoded(text) is not None and matches_expression(NESTED[name], decoded(text))
    }


def test_every_character_has_one_text():
    every = encoded(ANY_CHAR)
    characters = [chr(code) for code in (*range(0x300), 0x2028, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)]
    assert accepted(every, map(dumps, characters)) == set(map(dumps, characters))
    machine = regular.automaton(every)
    escaped = [f'"\\u{code:04x}"' for code in range(0x10000)]
    assert {text for text in escaped if regular.accepts(machine, text)} == {
        dumps(chr(code)) for code in range(0x20) if len(dumps(chr(code))) == 8
    }


def test_simple_sets_have_simple_texts_without_intersections_and_complements():
    for strings in (
        StringSet.anything(),
        StringSet.of_length(1, 9),
        StringSet.of_length(1).intersect(StringSet.of_length(0, 9)),
        StringSet.pattern("^[a-z]+$"),
        StringSet.only(["a", "b"]).intersect(StringSet.pattern("a")),
        StringSet.only(["a", "b"]).complement().intersect(StringSet.only(["b", "c"])),
        StringSet.of_length(1, 9).complement(),
        StringSet.pattern("^a").complement().complement(),
    ):
        assert "Both(" not in str(strings.encoded())
        assert "Not(" not in str(strings.encoded())
    assert StringSet.only(["a"]).encoded() == Terminal(Text('"a"'))


def test_halves_of_surrogate_pairs_are_in_no_set():
    strings = StringSet.only(["a", "\ud800", "b\udfff"])
    assert list(strings.values) == ["a"]
    assert StringSet.anything().among(["\ud800", "a"]) == ("a",)
    assert StringSet.only(["b"]).complement().among(["\ud800", "a", "b"]) == ("a",)
    assert StringSet.only(["\ud800"]).is_empty()
    with pytest.raises(GrammarError, match="surrogate"):
        encoded(Text("\ud800"))


def test_what_is_nested_too_deep_or_calls_rules_is_refused():
    deep = Text("a")
    for _ in range(1000):
        deep = Chain((deep, Text("b")))
    with pytest.raises(GrammarError, match="too deep"):
        encoded(deep)
    with pytest.raises(GrammarError, match="regular"):
        encoded(RuleCall("rule"))


def test_patterns_are_not_anchored_and_read_as_ecma_does():
    assert StringSet.pattern("b").among(["abc", "b", "a"]) == ("abc", "b")
    assert StringSet.pattern(r"^\d$").among(["1", "١"]) == ("1",)
    with pytest.raises(GrammarError):
        StringSet.pattern("(")


def test_complements_of_complements_are_the_sets_themselves():
    assert negated(negated(Text("a"))) == Text("a")
    assert negated(NOTHING) == ANYTHING
    assert negated(ANYTHING) == NOTHING
