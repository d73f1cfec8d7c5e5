"""Expressions that begin differently, against Python's own `re` over all short strings."""

import random
import re
from itertools import product

import pytest
from samples import some

from tureen.grammar import regex
from tureen.grammar.expression import Both, Not
from tureen.grammar.first_sets import are_apart
from tureen.grammar.regular import automaton
from tureen.grammar.schema import strings
from tureen.grammar.small_sets import few_strings

LETTERS = ("a", "b", "é", "ab", "[^a]", "[ab]", ".", "bab")
COUNTS = ("*", "+", "?", "{2}", "{0,2}", "{1,3}")
TEXTS = ["".join(letters) for length in range(6) for letters in product("abé", repeat=length)]


def random_pattern(source: random.Random, depth: int = 3) -> str:
    kind = source.randrange(4 if depth else 1)
    if kind == 0:
        return source.choice(LETTERS)
    inner = random_pattern(source, depth - 1)
    if kind == 1:
        return f"(?:{inner}){source.choice(COUNTS)}"
    other = random_pattern(source, depth - 1)
    return inner + other if kind == 2 else f"(?:{inner}|{other})"


def matched(pattern: str) -> set[str]:
    return {text for text in TEXTS if re.fullmatch(pattern, text, re.DOTALL)}


def test_what_is_told_apart_has_no_string_in_common():
    source = random.Random(3)
    num_apart = 0
    for _ in range(1500):
        first, second = random_pattern(source), random_pattern(source)
        if are_apart(regex.parse(first, flavour="ecma"), regex.parse(second, flavour="ecma")):
            num_apart += 1
            assert not matched(first) & matched(second), (first, second)
    assert num_apart > 100


@pytest.mark.parametrize(
    ("first", "second"),
    [("u?int8", "u?fixed"), ("bytes", "bytes[0-9]+"), ("bool", "bytes"), ("a{3}", "a{5}"), ("é+", "[a-z]*x")],
)
def test_what_differs_in_its_first_six_characters_is_told_apart(first, second):
    assert are_apart(regex.parse(first, flavour="ecma"), regex.parse(second, flavour="ecma"))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(4), 2))
def test_intersections_of_alternatives_that_begin_differently_have_the_same_strings(seed):
    source = random.Random(seed)
    for _ in range(60):
        first, second = random_pattern(source), random_pattern(source)
        expressions = [regex.parse(pattern, flavour="ecma") for pattern in (first, second)]
        common = strings.both(*expressions)
        rest = strings.both(expressions[0], strings.negated(expressions[1]))
        assert automaton(common) == automaton(Both(*expressions)), (first, second)
        assert automaton(rest) == automaton(Both(expressions[0], Not(expressions[1]))), (first, second)
        matches = strings.StringSet(common).contains
        assert {text for text in TEXTS if matches(text)} == matched(first) & matched(second), (first, second)


def test_few_strings_are_all_of_an_expression():
    source = random.Random(5)
    num_listed = 0
    for _ in range(1500):
        pattern = random_pattern(source)
        few = few_strings(regex.parse(pattern, flavour="ecma"))
        if few is not None:
            num_listed += 1
            assert {text for text in few if len(text) < 6 and set(text) <= set("abé")} == matched(pattern), pattern
    assert num_listed > 100


@pytest.mark.parametrize(
    "pattern", ["a*", "[a-z]{2}", "(?:ab|a){7}", "a{65}", "(?:(?:a{30}){30}){30}", "(?:b{900}){0,60}"]
)
def test_many_or_long_strings_are_not_listed(pattern):
    assert few_strings(regex.parse(pattern, flavour="ecma")) is None
