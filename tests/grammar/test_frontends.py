"""A constraint to its language: which frontend, what comes before it, bounds."""

import json
import re
from itertools import product

import pytest
from matching import matches

from tureen.grammar import frontends
from tureen.grammar.base import GrammarSpec
from tureen.grammar.expression import ANY_CHAR, EMPTY, Choice, GrammarError, Terminal
from tureen.grammar.frontends import MAX_CHOICES, language_of
from tureen.grammar.rules import calls

INTEGER = '{"type": "integer"}'


def strings(alphabet, most):
    return ("".join(letters) for length in range(most + 1) for letters in product(alphabet, repeat=length))


@pytest.mark.parametrize(
    ("kind", "text", "fits", "fails"),
    [
        ("json_schema", INTEGER, ["1", "-20"], ["", "01", "1 ", '"1"']),
        ("regex", "[ab]+c?", ["a", "abac"], ["", "c", "ac\n", "xac", "acx"]),
        ("ebnf", 'root ::= "Hello" | "Hi" | "Hey"', ["Hello", "Hi", "Hey"], ["", "Hel", "Hi!"]),
        ("ebnf", 'root ::= "(" root ")" | ""', ["", "(())"], ["(", "()()"]),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}',
            ["x"],
            ["y"],
        ),
        ("choice", '["yes", "no", "n"]', ["yes", "no", "n"], ["", "y", "yesno"]),
    ],
)
def test_every_kind_is_read_by_its_frontend_and_the_whole_output_must_match(kind, text, fits, fails):
    language = language_of(GrammarSpec(kind, text))
    assert [sample for sample in fits if not matches(language, sample)] == []
    assert [sample for sample in fails if matches(language, sample)] == []


@pytest.mark.parametrize("pattern", ["a|ab|b+", "(ab?)*", "a{2,3}b?", "", "(a|b)*ab"])
def test_a_regular_expression_is_pythons_fullmatch(pattern):
    language = language_of(GrammarSpec("regex", pattern))
    for text in strings("ab", 6):
        assert matches(language, text) == bool(re.fullmatch(pattern, text)), text


TAG = '{"type": "structural_tag", "format": %s}'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"\d\w\s"),
        ("regex", r"[\d][\w][^\S]"),
        ("ebnf", r"root ::= /\d\w\s/"),
        ("ebnf", "start: /\\d/ LETTER /\\s/\nLETTER: /\\w/"),
        ("structural_tag", TAG % r'{"type": "regex", "pattern": "\\d\\w\\s"}'),
        ("structural_tag", TAG % r'{"type": "grammar", "grammar": "root ::= /\\d\\w\\s/"}'),
        ("structural_tag", TAG % r'{"type": "json_string", "pattern": "\\d\\w\\s"}'),
    ],
)
def test_shorthands_are_ascii_in_every_notation_unless_the_server_says_otherwise(kind, text):
    quote = '"' if "json_string" in text else ""
    narrow, wide = (language_of(GrammarSpec(kind, text, unicode_classes=wide)) for wide in (False, True))
    # the second to fourth have a digit, a letter, a space of another script
    samples = [f"{quote}{sample}{quote}" for sample in ("1a ", "\u0663a ", "1\xe9 ", "1a\u3000")]
    assert [matches(narrow, sample) for sample in samples] == [True, False, False, False]
    assert [matches(wide, sample) for sample in samples] == [True] * 4


def test_a_pattern_can_ask_for_all_scripts_itself():
    assert matches(language_of(GrammarSpec("regex", r"(?u)\d\w")), "\u0663\xe9")


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "a+"), ("choice", '["a", "b"]'), ("ebnf", "root ::= x x\nx ::= [0-9]+"), ("regex", "a+b*")],
)
def test_what_is_regular_is_one_lexeme_as_nothing_follows(kind, text):
    language = language_of(GrammarSpec(kind, text))
    assert isinstance(language.start, Terminal)
    assert not language.rules


def test_a_lexeme_is_never_empty():
    start = language_of(GrammarSpec("regex", "a*")).start
    assert isinstance(start, Choice)
    assert start.items[0] == EMPTY
    assert isinstance(start.items[1], Terminal)
    assert not matches(language_of(GrammarSpec("regex", "a*")).__class__(start.items[1]), "")


@pytest.mark.parametrize("marker", ["a", "ab", "aa", "aba"])
def test_with_a_marker_the_constraint_begins_right_after_its_first_occurrence(marker):
    language = language_of(GrammarSpec("regex", "b*a?", marker))
    for text in strings("ab", 8):
        _, found, rest = text.partition(marker)
        assert matches(language, text) == bool(found and re.fullmatch("b*a?", rest)), text


def test_json_can_come_after_reasoning():
    language = language_of(GrammarSpec("json_schema", INTEGER, "</think>"))
    assert matches(language, "Is 2 < 3? </thin</think>12")
    assert not matches(language, "12")
    assert not matches(language, "x</think>12</think>12")
    assert not matches(language, "x</think> 12")


def test_rules_stay_with_a_marker():
    language = language_of(GrammarSpec("ebnf", 'root ::= "(" root ")" | ""', "#"))
    assert set(calls(language.start)) == set(language.rules)
    assert matches(language, "x#(())")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec("choice", "yes"), "choice is not valid JSON"),
        (GrammarSpec("choice", '"yes"'), "choice must be a list that is not empty, got 'yes'"),
        (GrammarSpec("choice", "[]"), "choice must be a list that is not empty, got a list of 0"),
        (GrammarSpec("choice", '["a", ""]'), r"choice\[1\] is empty"),
        (GrammarSpec("choice", '["a", 1]'), r"choice\[1\] must be a string, got 1"),
        (GrammarSpec("choice", '["a", "b", "a"]'), r"choice\[2\] is a duplicate: 'a'"),
        (GrammarSpec("choice", r'["\ud800"]'), r"choice\[0\] holds half of a surrogate pair"),
        (GrammarSpec("choice", "[" * 30_000), "choice is nested too deep"),
        (GrammarSpec("choice", json.dumps([str(at) for at in range(MAX_CHOICES + 1)])), "choice has too many texts"),
        (GrammarSpec("regex", "(a"), "a group is not closed"),
        (GrammarSpec("regex", "a(?!b)b"), "regex 'a.*b': no string matches this pattern"),
        (GrammarSpec("regex", "a\0"), "regex holds a NUL character"),
        (GrammarSpec("regex", "\ud800"), "regex holds half of a surrogate pair"),
        (GrammarSpec("regex", "é" * (1 << 17) + "a"), "regex is too large: 262145 bytes; at most 262144"),
        (GrammarSpec("regex", "(" * 30_000 + "a" + ")" * 30_000), "nested"),
        (GrammarSpec("ebnf", 'root ::= "a" | ' + "(" * 30_000), "parentheses are nested more than 20 deep"),
        (GrammarSpec("ebnf", "x"), "'x' is before the first rule"),
        (GrammarSpec("json_schema", '{"type": 3}'), "type"),
        (GrammarSpec("json_schema", '{"not":' * 20_000), "nested too deep"),
        (GrammarSpec("json_schema", "{"), "json_schema is not valid JSON"),
        (GrammarSpec("json_schema", " " * (2 << 20) + "{"), "json_schema is too large: 2097153 bytes; at most 2097152"),
        (GrammarSpec("json_schema", "{" + ", ".join(f'"{at}": 1' for at in (*range(150_000), 149_999)) + "}"), "twice"),
        (GrammarSpec("structural_tag", "[]"), "structural_tag must be an object"),
        (GrammarSpec("structural_tag", '{"a":' * 30_000), "structural_tag is nested too deep"),
        (GrammarSpec("regex", "a", "x" * 1025), "the marker that the constraint comes after is too large"),
        (GrammarSpec("regex", "a", "\0"), "the marker that the constraint comes after holds a NUL"),
    ],
)
def test_what_is_wrong_is_said(spec, message):
    with pytest.raises(GrammarError, match=message) as refusal:
        language_of(spec)
    assert 0 < len(str(refusal.value)) < 1_000


@pytest.mark.parametrize(("error", "message"), [(RecursionError, "nested too deep"), (MemoryError, "too large")])
def test_what_exhausts_the_interpreter_is_refused(monkeypatch, error, message):
    def exhausted(text, **_):
        raise error

    monkeypatch.setattr(frontends, "json_schema", exhausted)
    with pytest.raises(GrammarError, match=f"json_schema is {message}"):
        language_of(GrammarSpec("json_schema", "{}"))


def test_many_choices_are_one_lexeme():
    language = language_of(GrammarSpec("choice", json.dumps([f"{at:05}" for at in range(MAX_CHOICES)])))
    assert isinstance(language.start, Terminal)
    assert matches(language, "09999")
    assert not matches(language, "10000")
    assert ANY_CHAR not in language.start.item.items


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", '{"minimum": NUMBER}'), ("choice", "[NUMBER]"), ("structural_tag", '{"a": NUMBER}')],
)
def test_an_exponent_beyond_all_decimals_is_refused_by_name(kind, text, sign):
    number = f"1e{sign}{'9' * 30}"
    with pytest.raises(GrammarError, match=f"{kind} has a number with too many digits"):
        language_of(GrammarSpec(kind, text.replace("NUMBER", number)))
