"""Ranges of JSON numbers with conditions, and their texts.

Every text of a range reads as a number of the range, by a reader of decimals and by a reader of doubles. (A multiple of
a decimal step: the shortest decimal that reads as the same double is one.) Not every number of a range has a text:

- integers have at most 20 digits, or as many as a bound has, up to 40;
- what has a fraction has at most 15 digits, so that different texts are different doubles; how many of them are behind
  the point follows from bounds and steps. Where at most the sign is bounded: 20 before and 15 behind, and an exponent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from tureen.grammar.expression import NOTHING, Both, Chars, Expression, GrammarError, Not, Text
from tureen.grammar.number_digits import EXACT_DIGITS, MAX_DIGITS
from tureen.grammar.schema.digits import (
    DIGIT,
    POINT,
    ZERO,
    Bound,
    Digits,
    Number,
    chain,
    choice,
    decimals,
    every_decimal,
    integers,
    multiples,
    repeat,
)

MAX_BOUND_DIGITS = 40

FREE_DIGITS = Digits(whole=MAX_DIGITS, before=MAX_DIGITS, after=EXACT_DIGITS)
UNBOUNDED_BEFORE = 9  # digits before the point where a side has no bound
MIN_AFTER, MAX_PLACES = 3, 12
MAX_LISTED = 1000
MAX_TRIES = 20_000

EXPONENT = chain(Chars(((69, 69), (101, 101))), repeat(Chars(((43, 43), (45, 45))), 0, 1), repeat(DIGIT, 1, 2))


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers between the bounds (None = no bound) that fulfil every condition.

    Bounds are as the schema has them, not as a reader of doubles rounds them.
    """

    low: Bound | None = None
    high: Bound | None = None
    steps: frozenset[Fraction] = frozenset()  # multiples of each
    against: frozenset[Fraction] = frozenset()  # multiples of none
    without: frozenset[Number] = frozenset()

    def contains(self, value: Number) -> bool:
        """Returns exactly whether the number is in the range."""
        low, high = self.low, self.high
        if low and (value < low.value or (low.is_open and value == low.value)):
            return False
        if high and (value > high.value or (high.is_open and value == high.value)):
            return False
        if value in self.without:
            return False
        exact = Fraction(value)
        return all(exact % step == 0 for step in self.steps) and all(exact % step != 0 for step in self.against)

    def intersect(self, other: Range) -> Range:
        """Returns the numbers that are in both."""
        return Range(
            max((self.low, other.low), key=_by_low),
            min((self.high, other.high), key=_by_high),
            self.steps | other.steps,
            self.against | other.against,
            self.without | other.without,
        )

    def complement(self) -> Iterator[Range]:
        """Yields ranges that together hold the numbers that are not in it."""
        if self.low:
            yield Range(high=Bound(self.low.value, not self.low.is_open))
        if self.high:
            yield Range(low=Bound(self.high.value, not self.high.is_open))
        for step in self.steps:
            yield Range(against=frozenset([step]))
        for step in self.against:
            yield Range(steps=frozenset([step]))
        for value in self.without:
            yield Range(Bound(value, False), Bound(value, False))

    @property
    def point(self) -> Number | None:
        """Returns the number, where the bounds leave one at most."""
        low, high = self.low, self.high
        return low.value if low and high and low.value == high.value else None

    @property
    def whole_steps(self) -> frozenset[Fraction]:
        """Returns the step of one where the range has integers only; else none."""
        return frozenset([ONE]) if any(step.denominator == 1 for step in self.steps) else frozenset()

    @property
    def is_free(self) -> bool:
        """Returns whether the range says nothing but which signs there are: readers of any precision agree."""
        bounds = [bound.value for bound in (self.low, self.high) if bound]
        return not (self.steps or self.against or self.without or any(bounds))

    @property
    def as_read(self) -> Range:
        """Returns the numbers that are in it for readers of decimals and for readers of doubles alike."""
        low, high = _as_read(self.low, True), _as_read(self.high, False)
        return self if low is self.low and high is self.high else replace(self, low=low, high=high)

    def is_empty(self) -> bool:
        """Returns exactly whether it is empty, also where no number of it has a text. Raises GrammarError where that
        takes too long."""
        low, high = self.low, self.high
        if self.point is not None:
            return not self.contains(self.point)
        if low and high and low.value > high.value:
            return True
        if not self.steps:
            return False
        step = common_step(self.steps)
        if any(step % other == 0 for other in self.against):
            return True
        return low is not None and high is not None and next(_multiples(self, low, high, step), None) is None

    def values(self, limit: int) -> list[Number] | None:
        """Returns the numbers that have texts, where these are few; None for others. Raises GrammarError."""
        part = self.as_read
        if not part.steps or part.low is None or part.high is None:
            return None
        first, last = _counts(part.low, part.high, common_step(part.steps))
        return None if last - first >= limit else list(_found(part, _grid(part)))

    def expression(self) -> Expression:
        """Returns the texts. Raises GrammarError."""
        part = self.as_read
        if part.is_free:
            is_all = part.low is None and part.high is None
            texts = every_decimal(FREE_DIGITS) if is_all else decimals(part.low, part.high, FREE_DIGITS)
            return chain(texts, repeat(EXPONENT, 0, 1))
        grid = _grid(part)
        if next(_found(part, grid), None) is None:
            return NOTHING
        if grid.step > 1:
            few = part.values(MAX_LISTED)
            if few is not None:
                return choice(_spelling(value, grid.places) for value in few)
        if grid.places:
            texts = decimals(part.low, part.high, grid.digits, is_fraction=ONE in part.against)
        else:
            limit = 10**grid.digits.whole
            texts = integers(*_counts(*_clipped(part, Bound(-limit, True), Bound(limit, True)), ONE))
        if grid.step > 1:
            texts = Both(texts, multiples(grid.step, grid.places))
        return _with_exceptions(texts, part, grid)


ONE = Fraction(1)


class _Grid(NamedTuple):
    """The texts of a range are of multiples of step / 10**places."""

    step: int
    places: int
    digits: Digits


def common_step(steps: Iterable[Fraction]) -> Fraction:
    """Returns the least common multiple of the steps."""
    numerator, denominator = 1, 0
    for step in steps:
        numerator, denominator = math.lcm(numerator, step.numerator), math.gcd(denominator, step.denominator)
    return Fraction(numerator, denominator)


def _grid(part: Range) -> _Grid:
    """Raises GrammarError."""
    values: list[Number] = [*part.without, *(bound.value for bound in (part.low, part.high) if bound)]
    sizes = [len(str(abs(int(value)))) for value in values]
    is_decimal = any(step.denominator > 1 for step in part.steps | part.against)
    kept = [size for size in sizes if size <= MAX_BOUND_DIGITS]
    whole = max([EXACT_DIGITS if is_decimal else MAX_DIGITS, *kept])
    if part.steps:
        step, places = _decimal_step(common_step(part.steps))
        return _Grid(step, places, Digits(whole, EXACT_DIGITS - places, places))
    if part.low is None or part.high is None:
        sizes.append(UNBOUNDED_BEFORE)
    places_needed = [_places(Fraction(value)) for value in values] + [_places(step) for step in part.against]
    after = max(EXACT_DIGITS - max(sizes), MIN_AFTER, *(places for places in places_needed if places < EXACT_DIGITS))
    return _Grid(1, after, Digits(whole, EXACT_DIGITS - after, after))


def _places(value: Fraction) -> int:
    """How many digits after the point the multiples of a decimal have."""
    return next(places for places in itertools.count() if 10**places % value.denominator == 0)


def _decimal_step(step: Fraction) -> tuple[int, int]:
    """Two numbers, the step being the first / 10**second. Raises GrammarError."""
    places = _places(step)
    if places > MAX_PLACES:
        raise GrammarError(f'"multipleOf" has {places} digits after the point; at most {MAX_PLACES}')
    return int(step * 10**places), places


def _as_read(bound: Bound | None, is_low: bool) -> Bound | None:
    """The stricter of the bounds that readers of decimals and of doubles see; they differ from 2**53 on only."""
    if bound is None or isinstance(bound.value, int) or abs(bound.value) < 2**53:
        return bound
    read = int(float(bound.value))
    return bound if (bound.value > read) == is_low else Bound(read, bound.is_open)


Rank: TypeAlias = tuple[bool, Number, bool, Number]


def _by_low(bound: Bound | None) -> Rank:
    """Orders lower bounds, the stricter later. Of two that are read as one, the result says more than either."""
    read = _as_read(bound, True)
    return (True, read.value, read.is_open, bound.value) if bound and read else (False, 0, False, 0)


def _by_high(bound: Bound | None) -> Rank:
    read = _as_read(bound, False)
    return (False, read.value, not read.is_open, bound.value) if bound and read else (True, 0, False, 0)


def _clipped(part: Range, low: Bound, high: Bound) -> tuple[Bound, Bound]:
    """The bounds of the range, where they are stricter than these."""
    return max((part.low, low), key=_by_low) or low, min((part.high, high), key=_by_high) or high


def _counts(low: Bound, high: Bound, step: Fraction) -> tuple[int, int]:
    """How many steps it is to the first multiple and to the last one between bounds."""
    first, last = Fraction(low.value) / step, Fraction(high.value) / step
    return (
        math.floor(first) + 1 if low.is_open else math.ceil(first),
        math.ceil(last) - 1 if high.is_open else math.floor(last),
    )


def _multiples(part: Range, low: Bound, high: Bound, step: Fraction) -> Iterator[Fraction]:
    """Yields the multiples between the bounds that the range does not leave out. Raises GrammarError where the next one
    is far away."""
    if any(step % other == 0 for other in part.against):
        return
    without = {Fraction(value) for value in part.without}
    first, last = _counts(low, high, step)
    for tries, count in enumerate(range(first, last + 1)):
        if tries == MAX_TRIES:
            raise GrammarError('its combination of "multipleOf" with "not" is too large')
        value = count * step
        if value not in without and all(value % other for other in part.against):
            yield value


def _found(part: Range, grid: _Grid) -> Iterator[Number]:
    """The numbers that have texts. Raises GrammarError where looking for the next one takes too long."""
    step = Fraction(grid.step, 10**grid.places)
    near, far = 10 ** (grid.digits.before if grid.places else grid.digits.whole), 10**grid.digits.whole
    places = [(Bound(-near, True), Bound(near, True), step)]
    if grid.places:  # further away there are integers only
        step = common_step([step, ONE])
        places += [(Bound(near, False), Bound(far, True), step), (Bound(-far, True), Bound(-near, False), step)]
    for low, high, step in places:
        for value in _multiples(part, *_clipped(part, low, high), step):
            yield int(value) if value.denominator == 1 else Decimal(value.numerator) / value.denominator


def _spelling(value: Number, places: int | None) -> Expression:
    """The texts of a number with a limit on the digits after the point (None: no limit)."""
    digits, _, behind = format(Decimal(value), "f").partition(".")
    more = repeat(ZERO, 0, None if places is None else places - len(behind))
    if behind:
        return chain(Text(f"{digits}.{behind}"), more)
    if places == 0:
        return Text(digits)
    zeros = chain(POINT, repeat(ZERO, 1, places))
    return chain(Text(digits), repeat(zeros, 0, 1))


def _with_exceptions(texts: Expression, part: Range, grid: _Grid) -> Expression:
    """Returns the expression without the multiples and the single numbers that the range leaves out."""
    for step in sorted(part.against - {ONE}):
        number, places = _decimal_step(step) if grid.places else (step.numerator, 0)
        texts = Both(texts, Not(multiples(number, places)))
    if part.without:
        texts = Both(texts, Not(choice(_spelling(value, None) for value in sorted(part.without))))
    return texts
