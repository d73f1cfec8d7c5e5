"""Lookbehind, assertions in repeats, atomic groups, verbose patterns, properties: what `regex` matches."""

import itertools
import random
import re

import pytest
import regex
from samples import some

from tureen.grammar.expression import GrammarError
from tureen.grammar.regex import parse, search
from tureen.grammar.regular import accepts, automaton

TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product("ab-\n", repeat=length)]
ATOMS = ["a", "b", "-", "ab", "[ab]", "[^a]", ".", r"\w", r"\s", "a|b", "a|ab", "b?"]
MARKS = ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?m:^)", "(?m:$)"]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{2,}"]


class Patterns:
    """Random patterns."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def chain(self, depth, most):
        return "".join(self.item(depth) for _ in range(self.random.randrange(1, most)))

    def item(self, depth):
        kind = self.random.randrange(10) if depth else self.random.randrange(3)
        if kind < 2:
            return f"(?:{self.random.choice(ATOMS)})"
        if kind == 2:
            return self.random.choice(MARKS)
        inner = self.chain(depth - 1, 3)
        if kind < 5:
            return self.random.choice(["(?<={})", "(?<!{})", "(?={})", "(?!{})"]).format(inner)
        if kind < 7:
            return f"(?:{inner})" + self.random.choice(QUANTIFIERS)
        if kind == 7:
            return f"(?:{inner})" + self.random.choice(QUANTIFIERS) + "+"
        if kind == 8:
            return f"(?>{inner})"
        return f"(?:{inner}|{self.chain(depth - 1, 3)})"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(6), 2))
def test_random_patterns_match_what_regex_matches(seed):
    patterns = Patterns(seed)
    parsed = 0
    for _ in range(250):
        pattern = patterns.chain(3, 4)
        try:
            machine = automaton(parse(pattern, flavour="python"))
        except GrammarError:
            continue
        parsed += 1
        expected = regex.compile(pattern)
        texts = TEXTS[r"\B" in pattern :]  # of the empty text, `re` of this Python and `regex` say different things
        wrong = [text for text in texts if accepts(machine, text) != bool(expected.fullmatch(text))]
        assert not wrong, (pattern, wrong)
    assert parsed > 80


@pytest.mark.parametrize(
    "pattern",
    [
        r"-?(?<!\w)\w{2}(?!\w)-?",
        r"\w+(?<!ab)",
        r"(?<=^|-)a+b(?=-|$)",
        r"(?:\b\w+\b[- ]?)+",
        r"(?:a(?=b)|b(?!b))+",
        r"^(?!.*--)[ab-]+(?<!-)$",
        r"(?:(?<!a)a|(?<!b)b)+",
        r"[ab]++-?",
        r"(?:ab)*+a?",
        r"(?>a|ab)b",
        r"(?>ab|a)b?",
        r"(?>[ab]+)-",
        r"(?>a?b*)-",
        r"a{1,2}+a",
        r"(?>-?a+)b|(?>b++-)",
        r"((?!ab).)*b*",
        r"(?:(?!\bb).)*",
        r"(?<!-)(?:^|b)*a?",
        r"(?x) a b  # a comment\n | (?: - [ ] )+ ",
        r"(?x: a \  b ) -?",
        r"(?x)a (?-x: )b | [#] \#",
        r"(?x)a + b {2}",
        r"\p{L}+|\P{L}{2}",
        r"[\p{Ll}-]*",
        r"\pL-\p{^Lu}",
    ],
)
def test_what_people_write_matches_what_regex_matches(pattern):
    alphabet = "ab- \n#" if "x" in pattern else "abA-"
    expected, machine = regex.compile(pattern), automaton(parse(pattern, flavour="python"))
    texts = ["".join(chars) for length in range(6) for chars in itertools.product(alphabet, repeat=length)]
    taken = [text for text in texts if expected.fullmatch(text)]
    assert taken
    assert [text for text in texts if accepts(machine, text)] == taken


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(?<!\d)\d{2}", r"(?<=a)b", r"(?:\bab?\b)+", r"(?:a(?!b)|b)*$", r"^(?<!a)b", r"((?!no).)*-$", r"(?<!^)a"),
        *("[ab].{1,3}", "a{2,3}(?:b|-{2,})1?", "(?:a|b{2,3}1*)-{0,2}", "a*", "(?:ab){2,}|1{2,4}", "(?:a|)b{1,2}"),
    ],
)
def test_a_pattern_that_is_searched_for_is_found_where_re_finds_it(pattern):
    machine, expected = automaton(search(pattern, flavour="ecma")), re.compile("(?a)" + pattern.replace("$", r"\Z"))
    texts = ["".join(chars) for length in range(6) for chars in itertools.product("ab-1", repeat=length)]
    assert [text for text in texts if accepts(machine, text)] == [text for text in texts if expected.search(text)]


@pytest.mark.parametrize("written", [r"\p{Script=Greek}", r"\p{sc=Han}", r"\P{Alphabetic}", r"\p{White_Space}"])
def test_properties_hold_the_characters_that_regex_finds(written):
    points = [point for point in range(0, 0x30000, 3) if not 0xD800 <= point <= 0xDFFF]
    machine, expected = automaton(parse(written, flavour="ecma")), regex.compile(written)
    assert [at for at in points if accepts(machine, chr(at))] == [at for at in points if expected.match(chr(at))]


def test_texts_with_the_code_points_that_mark_places_are_left_out():
    machine = automaton(parse("(?:.(?<!a))+", flavour="python"))
    assert [text for text in ("b", "\ufdcf", "\ufdf0", "é") if not accepts(machine, text)] == []
    assert not accepts(machine, "b\ufdd0")
