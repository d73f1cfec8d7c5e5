"""Sets of JSON strings as regular expressions over their decoded characters, and their one canonical encoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from json.encoder import encode_basestring

from tureen.errors import echo
from tureen.grammar import regex, regular
from tureen.grammar.alphabet import Ranges, merged
from tureen.grammar.derivatives import Matcher
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.first_sets import are_apart
from tureen.grammar.remembered import Remembered
from tureen.grammar.rules import calls, can_be_empty, is_nothing, replaced
from tureen.grammar.schema.digits import chain, choice
from tureen.grammar.small_sets import few_strings

MAX_NESTING = 200
"""The deepest nesting of an expression that is encoded."""

QUOTE = Text('"')
ESCAPED = (*range(0x20), 0x22, 0x5C)
SHORT = {code: json.dumps(chr(code))[2] for code in ESCAPED if len(json.dumps(chr(code))) == 4}
"""The letters behind the backslash, by character."""


_known_encoded: Remembered[Expression] = Remembered()
_known_lengths: Remembered[tuple[int, int | None]] = Remembered()


@dataclass(frozen=True)
class StringSet:
    """Strings, as a regular expression over decoded characters. No set has one with half of a surrogate pair."""

    expression: Expression

    @staticmethod
    def anything() -> StringSet:
        """Returns the set of all strings."""
        return EVERY_STRING

    @staticmethod
    def nothing() -> StringSet:
        """Returns the empty set."""
        return NO_STRING

    @staticmethod
    def only(values: Iterable[str]) -> StringSet:
        """Returns the set of exactly these strings; those with half of a surrogate pair are left out."""
        return StringSet(one_of(values))

    @staticmethod
    def pattern(pattern: str) -> StringSet:
        """Returns the strings in which a JSON Schema `pattern` is found: ECMA 262, with the flag u. Raises
        GrammarError."""
        return StringSet(matching(pattern))

    @staticmethod
    def of_length(least: int = 0, most: int | None = None) -> StringSet:
        """Returns the strings of `least` to `most` code points, None = without end."""
        return StringSet(length(least, most))

    def intersect(self, other: StringSet) -> StringSet:
        """Returns the strings of both. Raises GrammarError."""
        for finite, rest in ((self, other), (other, self)):
            if finite.values is not None:
                kept = rest.among(finite.values)
                return finite if len(kept) == len(finite.values) else StringSet.only(kept)
        common = both(self.expression, other.expression)
        return self if common is self.expression else other if common is other.expression else StringSet(common)

    def union(self, other: StringSet) -> StringSet:
        """Returns the strings of either."""
        return StringSet(either(self.expression, other.expression))

    def complement(self) -> StringSet:
        """Returns all other strings."""
        return self._complement

    @cached_property
    def _complement(self) -> StringSet:
        return StringSet(negated(self.expression))

    def minus(self, other: StringSet) -> StringSet:
        """Returns the strings that `other` does not have. Raises GrammarError."""
        return self.intersect(other.complement())

    def contains(self, value: str) -> bool:
        """Raises GrammarError where that takes too long to find out."""
        return bool(self.among((value,)))

    def among(self, values: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the values that are in the set. Raises GrammarError where that takes too long to find
        out."""
        known = self.values
        if known is not None:
            return tuple(value for value in values if value in known)
        if isinstance(self.expression, Not):
            left_out = _texts(self.expression.item)
            if left_out is not None:
                return tuple(value for value in values if value not in left_out and not _has_surrogate(value))
        texts = [value for value in values if not _has_surrogate(value)]
        if self.expression == ANYTHING:
            return tuple(texts)
        texts = [text for text in texts if not are_apart(Text(text), self.expression)]
        if not texts:
            return ()
        try:
            return tuple(filter(self._matcher.matches, texts))
        except GrammarError:  # it may be what all the questions before have taken
            return tuple(filter(Matcher(self.expression).matches, texts))

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self.expression)

    def is_empty(self) -> bool:
        """Returns exactly whether it is empty. Raises GrammarError where that takes too long to find out."""
        return self._is_empty

    @cached_property
    def _is_empty(self) -> bool:
        return not can_be_empty(self.expression) and regular.is_empty(self.expression)

    @cached_property
    def is_endless(self) -> bool:
        """Returns True only where it is plain to see that there are ever longer ones."""
        return _is_endless(self.expression)

    @cached_property
    def values(self) -> dict[str, None] | None:
        """Returns the strings of a set that was made of single strings; None for others."""
        return _texts(self.expression)

    def encoded(self) -> Terminal:
        """Returns the JSON texts of these strings, of which there are some, quotes included. Raises GrammarError."""
        return self._encoded

    @cached_property
    def _encoded(self) -> Terminal:
        return Terminal(encoded(self.expression).item, is_live=True)


def length(least: int = 0, most: int | None = None) -> Expression:
    """Returns strings of `least` to `most` code points, None = without end."""
    if (least, most) == (0, None):
        return ANYTHING
    return NOTHING if most is not None and most < least else Repeat(ANY_CHAR, least, most)


def matching(pattern: str) -> Expression:
    """Returns strings in which a JSON Schema `pattern` is found. Raises GrammarError."""
    return regex.search(pattern, flavour="ecma")


def one_of(values: Iterable[str]) -> Expression:
    """Returns exactly these strings; those with half of a surrogate pair, which no text has, are left out."""
    return choice(Text(value) for value in values if not _has_surrogate(value))


def both(first: Expression, second: Expression) -> Expression:
    """Returns the intersection, with what is plain to see made simple."""
    if first == ANYTHING or second == ANYTHING:
        return second if first == ANYTHING else first
    if NOTHING in (first, second):
        return NOTHING
    if first == second:
        return first
    match first, second:
        case Repeat(item, least, most), Repeat(item_too, least_too, most_too) if item == item_too == ANY_CHAR:
            ends = [end for end in (most, most_too) if end is not None]
            return length(max(least, least_too), min(ends, default=None))
        case Not(item), Not(item_too):
            return negated(either(item, item_too))
        case (Repeat(item, least, most), other) | (other, Repeat(item, least, most)) if item == ANY_CHAR:
            bounded = _of_length(other, least, most)
            if bounded is not None:
                return bounded
        case (Not() as others, values) | (values, Not() as others):
            return _left(values, others)
    return _common(first, second)


def _common(first: Expression, second: Expression) -> Expression:
    """Returns the intersection, without the alternatives that begin otherwise than all that they are met with."""
    for expression, other in ((first, second), (second, first)):
        common = [item for item in _alternatives(expression) if not are_apart(item, other)]
        if len(common) < len(_alternatives(expression)):
            return both(choice(common), other)
    return Both(first, second)


def _left(values: Expression, others: Not) -> Expression:
    """Returns the intersection with a complement: the alternatives that begin otherwise stay as they are."""
    common = [item for item in _alternatives(values) if not are_apart(item, others.item)]
    if len(common) == len(_alternatives(values)):
        return Both(values, others)
    kept = choice(item for item in _alternatives(values) if are_apart(item, others.item))
    return either(kept, both(choice(common), others)) if common else kept


def _alternatives(expression: Expression) -> tuple[Expression, ...]:
    return expression.items if isinstance(expression, Choice) else (expression,)


def _of_length(expression: Expression, least: int, most: int | None) -> Expression | None:
    """Returns those of the strings that have `least` to `most` code points; None where that takes an intersection. With
    one, an automaton counts characters in each of its states."""
    shortest, longest = _lengths(expression)
    if least <= shortest and (most is None or (longest is not None and longest <= most)):
        return expression
    if isinstance(expression, Choice):
        return _any_of_length(expression.items, least, most)
    items = expression.items if isinstance(expression, Chain) else (expression,)
    lengths = [_lengths(item) for item in items]
    open_ = [at for at, (low, high) in enumerate(lengths) if low != high]
    if len(open_) != 1:
        return None
    item, fixed = items[open_[0]], sum(low for at, (low, _) in enumerate(lengths) if at != open_[0])
    if not isinstance(item, Repeat) or not isinstance(item.item, Chars):
        return None
    low = max(item.least, least - fixed)
    ends = [end for end in (item.most, None if most is None else most - fixed) if end is not None]
    high = min(ends, default=None)
    if high is not None and high < low:
        return NOTHING
    return chain(*items[: open_[0]], Repeat(item.item, low, high), *items[open_[0] + 1 :])


def _any_of_length(items: Sequence[Expression], least: int, most: int | None) -> Expression | None:
    """Returns the alternatives with these lengths, as `_of_length` does: only some of them take an intersection."""
    bounded = [_of_length(item, least, most) for item in items]
    rest = [item for item, known in zip(items, bounded, strict=True) if known is None]
    if len(rest) == len(items):
        return None
    counted = Both(choice(rest), length(least, most)) if rest else NOTHING
    return either(choice(known for known in bounded if known is not None), counted)


def _lengths(expression: Expression) -> tuple[int, int | None]:
    """How many code points the strings have at least and at most, None = without end; less and more than that where a
    quick look does not tell."""
    if type(expression) is Chain or type(expression) is Choice:
        return _known_lengths.get(expression, lambda: _lengths_of(expression))
    return _lengths_of(expression)


def _lengths_of(expression: Expression) -> tuple[int, int | None]:
    match expression:
        case Text(text):
            return len(text), len(text)
        case Chars(ranges) if ranges:
            return 1, 1
        case Chain(items):
            each = [_lengths(item) for item in items]
            return sum(low for low, _ in each), None if any(high is None for _, high in each) else _sum(each)
        case Choice(items) if items:
            each = [_lengths(item) for item in items]
            endless = any(high is None for _, high in each)
            return min(low for low, _ in each), None if endless else max(high or 0 for _, high in each)
        case Repeat(item, least, most):
            low, high = _lengths(item)
            return low * least, None if most is None or high is None else high * most
        case Terminal(item):
            return _lengths(item)
    return 0, None


def _is_endless(expression: Expression) -> bool:
    """Whether it matches ever longer strings; False also where a quick look does not tell."""
    match expression:
        case Repeat(item, _, None):
            return _lengths(item)[0] > 0 and regular.is_plainly_matched(item)
        case Chain(items):
            return any(map(_is_endless, items)) and all(map(regular.is_plainly_matched, items))
        case Choice(items):
            return any(map(_is_endless, items))
        case Not(item):
            return _lengths(item)[1] is not None
        case Terminal(item):
            return _is_endless(item)
    return False


def _sum(each: list[tuple[int, int | None]]) -> int:
    return sum(high or 0 for _, high in each)


def either(first: Expression, second: Expression) -> Expression:
    """Returns the union, with what is plain to see made simple."""
    if ANYTHING in (first, second):
        return ANYTHING
    return choice((*_alternatives(first), *_alternatives(second)))


def negated(item: Expression) -> Expression:
    """Returns the complement, with what is plain to see made simple."""
    match item:
        case Not(positive):
            return positive
        case Choice(()):
            return ANYTHING
        case Repeat(repeated, least, most) if repeated == ANY_CHAR:
            shorter = length(0, least - 1) if least else NOTHING
            return either(shorter, NOTHING if most is None else length(most + 1))
    return Not(item)


def _texts(expression: Expression) -> dict[str, None] | None:
    """The strings of an expression that is a choice of strings, or that has few."""
    items = expression.items if isinstance(expression, Choice) else (expression,)
    texts = [item.text for item in items if isinstance(item, Text)]
    if len(texts) == len(items):
        return dict.fromkeys(texts)
    few = few_strings(expression)
    return None if few is None else dict.fromkeys(text for text in few if not _has_surrogate(text))


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def encoded(values: Expression) -> Terminal:
    """Returns the JSON texts of strings given by an expression over decoded characters, quotes included: a Terminal.

    Each character is written in one way: as json.dumps(…, ensure_ascii=False) does. Raises GrammarError.
    """
    if any(calls(values)):
        raise GrammarError("only regular expressions can describe strings")
    return Terminal(chain(QUOTE, _part_encoded(values, MAX_NESTING), QUOTE))


def encoded_language(values: Language, renamed: Callable[[str], RuleCall]) -> Language:
    """Returns the JSON texts of the strings of a language, quotes included, with its rules renamed."""
    rules = {renamed(name).name: replaced(_encoded(rule, MAX_NESTING), renamed) for name, rule in values.rules.items()}
    start = replaced(_encoded(values.start, MAX_NESTING), renamed)
    return Language(chain(QUOTE, start, QUOTE), rules)


def _encoded(node: Expression, depth: int) -> Expression:
    """Every character has a code of its own and none begins another's: so the encoding commutes with intersection."""
    if not depth:
        raise GrammarError(f"an expression for strings is nested too deep: at most {MAX_NESTING} levels")
    depth -= 1
    match node:
        case Text(text):
            return _text(text)
        case Chars(ranges):
            return _chars(ranges)
        case Chain(items) | Choice(items):
            parts = []
            for item in items:
                parts.append(_encoded(item, depth))
            return chain(*parts) if isinstance(node, Chain) else _choice_encoded(parts)
        case Repeat(item, least, most):
            return Repeat(_encoded(item, depth), least, most)
        case Terminal(item):
            return _encoded(item, depth)
        case Both(first, second):
            return _both_encoded(first, second, depth)
        case Not(item):
            return Both(ANY_ENCODED, Not(_encoded(item, depth)))
    return node


def _choice_encoded(parts: list[Expression]) -> Expression:
    """Returns any of the parts. None is there twice, as what differs is encoded differently: to compare them takes
    longer than all else."""
    return choice(parts) if any(map(is_nothing, parts)) or len(parts) < 2 else Choice(tuple(parts))


@lru_cache(4096)
def _text(text: str) -> Text:
    if _has_surrogate(text):
        raise GrammarError(f"{echo(text)} holds half of a surrogate pair (\\ud800 to \\udfff)")
    return Text(encode_basestring(text)[1:-1])


def _both_encoded(first: Expression, second: Expression, depth: int) -> Expression:
    """A complement inside an intersection needs no bounds of its own."""
    if isinstance(first, Not):
        first, second = second, first
    start = _part_encoded(first, depth)
    if isinstance(second, Not):
        return Both(start, Not(_part_encoded(second.item, depth)))
    return Both(start, _part_encoded(second, depth))


def _part_encoded(node: Expression, depth: int) -> Expression:
    return _known_encoded.get(node, lambda: _encoded(node, depth))


@lru_cache(1024)
def _chars(ranges: Ranges) -> Expression:
    """One character of these."""
    raw, codes = [], []
    for first, last in ranges:
        start = first
        for code in ESCAPED:
            if first <= code <= last:
                codes.append(code)
                raw += [(start, code - 1)] if start < code else []
                start = code + 1
        raw += [(start, last)] if start <= last else []
    items: list[Expression] = [Chars(tuple(raw))] if raw else []
    return choice([*items, chain(Text("\\"), _escapes(codes))]) if codes else Chars(tuple(raw))


def _escapes(codes: list[int]) -> Expression:
    """Returns an expression of what follows the backslash."""
    items = [_one_of(SHORT[code] for code in codes if code in SHORT)]
    long = [f"{code:02x}" for code in codes if code not in SHORT]
    ends = [chain(Text(digit), _one_of(text[1] for text in long if text[0] == digit)) for digit in "01"]
    return choice([*items, chain(Text("u00"), choice(ends))])


def _one_of(letters: Iterable[str]) -> Expression:
    """One of these characters."""
    points = sorted(set(map(ord, letters)))
    if not points:
        return NOTHING
    return Text(chr(points[0])) if len(points) == 1 else Chars(merged((code, code) for code in points))


EVERY_STRING = StringSet(ANYTHING)
NO_STRING = StringSet(NOTHING)
ANY_ENCODED = Repeat(_chars(ANY_CHAR.ranges))
