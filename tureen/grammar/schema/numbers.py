"""Sets of JSON numbers: exact set algebra, and the JSON texts of a set as an expression.

Which texts a range has is told in `ranges`; a single number has one: as json.dumps writes it, integers as integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache

from tureen.errors import echo
from tureen.grammar.expression import NOTHING, Expression, GrammarError, Terminal, Text
from tureen.grammar.schema.digits import Bound, Number, choice
from tureen.grammar.schema.ranges import MAX_LISTED, ONE, Range

MAX_CONSTANT = 10**400
MAX_RANGES = 256

ALL = Range()


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Single numbers and ranges, which may overlap. What has a fraction or exponent in the schema is a Decimal."""

    points: tuple[Number, ...] = ()
    ranges: tuple[Range, ...] = ()

    @staticmethod
    def anything() -> NumberSet:
        """Returns the set of all numbers."""
        return EVERY_NUMBER

    @staticmethod
    def nothing() -> NumberSet:
        """Returns the empty set."""
        return NO_NUMBER

    @staticmethod
    def integers() -> NumberSet:
        """Returns the integers. Numbers with a fraction of zeros are among them; but no text of the set has a
        fraction."""
        return EVERY_INTEGER

    @staticmethod
    def between(
        least: Number | None = None,
        most: Number | None = None,
        *,
        above: Number | None = None,
        below: Number | None = None,
    ) -> NumberSet:
        """Returns the numbers within minimum, maximum, exclusiveMinimum and exclusiveMaximum. Raises GrammarError."""
        closed = Range(_bound(least, False), _bound(most, False))
        return _made((), [closed.intersect(Range(_bound(above, True), _bound(below, True)))])

    @staticmethod
    def multiples_of(step: Number) -> NumberSet:
        """Returns the multiples of `step`, which is positive. Raises GrammarError."""
        return NumberSet(ranges=(Range(steps=frozenset([Fraction(_checked(step))])),))

    @staticmethod
    def only(values: Iterable[Number]) -> NumberSet:
        """Returns the set of exactly these numbers. Raises GrammarError."""
        return NumberSet(tuple(dict.fromkeys(map(_checked, values))))

    def intersect(self, other: NumberSet) -> NumberSet:
        """Returns the numbers of both. Raises GrammarError."""
        if ALL in self.ranges or ALL in other.ranges:
            return other if ALL in self.ranges else self
        points = _among(self.points, other) + _among(other.points, self)
        return _made(points, (left.intersect(right) for left in self.ranges for right in other.ranges))

    def union(self, other: NumberSet) -> NumberSet:
        """Returns the numbers of either. Raises GrammarError."""
        return _made(self.points + other.points, self.ranges + other.ranges)

    def complement(self) -> NumberSet:
        """Returns all other numbers. Raises GrammarError."""
        rest = _made((), [Range(without=frozenset(self.points))])
        for part in self.ranges:
            rest = rest.intersect(_made((), part.complement()))
        return rest

    def minus(self, other: NumberSet) -> NumberSet:
        """Returns the numbers that `other` does not have. Raises GrammarError."""
        return self.intersect(other.complement())

    def contains(self, value: Number) -> bool:
        """Whether readers of decimals and of doubles find it in the set."""
        return bool(_among((value,), self))

    def is_empty(self) -> bool:
        """Returns exactly whether nothing is in it, also where no number of the set has a text."""
        return not self.points and not self.ranges

    @property
    def values(self) -> tuple[Number, ...] | None:
        """Returns the numbers, where they are few; None for others. Raises GrammarError."""
        listed = dict.fromkeys(self.points)
        for part in self.ranges:
            few = part.values(MAX_LISTED)
            if few is None:
                return None
            listed.update(dict.fromkeys(few))
        return tuple(listed)

    def without_steps(self) -> NumberSet:
        """Returns more numbers: of "multipleOf" only what keeps them integers is left."""
        return _made(
            self.points,
            (replace(part, steps=part.whole_steps, against=frozenset(), without=frozenset()) for part in self.ranges),
        )

    def encoded(self) -> Expression:
        """Returns the JSON texts: a Terminal, or NOTHING where there are none. Raises GrammarError."""
        if self is EVERY_NUMBER or self is EVERY_INTEGER:
            return _every(is_integer=self is EVERY_INTEGER)
        texts: list[Expression] = [Text(_text(value)) for value in self.points]
        numbers = choice(texts + [part.expression() for part in self.ranges])
        return numbers if numbers == NOTHING else Terminal(numbers)


EVERY_NUMBER = NumberSet(ranges=(ALL,))
EVERY_INTEGER = NumberSet(ranges=(Range(steps=frozenset([ONE])),))
NO_NUMBER = NumberSet()


@cache
def _every(*, is_integer: bool) -> Expression:
    """The texts of all integers, or of all numbers: nearly every schema has one of them."""
    (part,) = EVERY_INTEGER.ranges if is_integer else EVERY_NUMBER.ranges
    return Terminal(part.expression())


def _made(points: Iterable[Number], ranges: Iterable[Range]) -> NumberSet:
    """Makes a set without its empty parts. Raises GrammarError."""
    single = dict.fromkeys(points)
    kept: dict[Range, None] = {}
    for part in ranges:
        if part == ALL:
            return EVERY_NUMBER
        if part in kept or part.is_empty():
            continue
        point = part.point
        if point is not None and part.as_read.contains(point):
            single[point] = None
        else:
            kept[part] = None
        if len(kept) > MAX_RANGES:
            raise GrammarError(f"it combines numbers into too many ranges: more than {MAX_RANGES}")
    return NumberSet(tuple(single), tuple(kept))


def _among(values: tuple[Number, ...], numbers: NumberSet) -> list[Number]:
    points = set(numbers.points)
    return [
        value for value in values if value in points or any(part.as_read.contains(value) for part in numbers.ranges)
    ]


def _bound(value: Number | None, is_open: bool) -> Bound | None:
    return None if value is None else Bound(_checked(value, is_bound=True), is_open)


def _checked(value: Number, is_bound: bool = False) -> Number:
    """Raises GrammarError for what readers of decimals and of doubles do not take as the same number."""
    if isinstance(value, int):
        if abs(value) >= MAX_CONSTANT:
            raise GrammarError("the schema has a number that is too large; at most 400 digits are allowed")
        return value
    read = float(value)
    if Decimal(repr(read)) != value:
        raise GrammarError(f"the schema has a number that is too large or too long: {echo(str(value))}; write a double")
    if abs(value) < 2**53:
        return int(value) if read.is_integer() else value
    if not is_bound and Decimal(read) != value:
        raise GrammarError(
            f"the schema has a number that no double holds exactly: {echo(str(value))}; write a smaller one"
        )
    return value


def _text(value: Number) -> str:
    """Returns the number as json.dumps writes it."""
    return str(value) if isinstance(value, int) else repr(float(value))
