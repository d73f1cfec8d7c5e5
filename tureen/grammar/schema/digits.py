"""The texts of JSON numbers in a range, and of multiples, as expressions over digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from typing import NamedTuple, TypeAlias

from tureen.grammar import regular
from tureen.grammar.expression import EMPTY, NOTHING, Both, Chain, Chars, Choice, Expression, GrammarError, Repeat, Text

Number: TypeAlias = int | Decimal

ZERO = Text("0")
POINT = Text(".")
MINUS = Text("-")
MAX_SUFFIXES = 1000
SIMPLE_FACTORS = (1, 3, 7)
"""The rests of a step without its factors 2 and 5 that are written. An expression for 9, 11, 13, … takes thousands of
pages."""


class Bound(NamedTuple):
    """An end of a range of numbers, which is in the range unless it is open."""

    value: Number
    is_open: bool  # the value itself is outside


class Digits(NamedTuple):
    """How many digits the texts have at most."""

    whole: int  # of an integer without a fraction
    before: int  # the point, where a fraction follows
    after: int  # the point


def _chars(text: str, first: int = 0, last: int = 9) -> Chars:
    """These characters, which are before the digits, and the digits from `first` to `last`."""
    return Chars((*((ord(char), ord(char)) for char in text), (48 + first, 48 + last)))


DIGIT = _chars("")


def choice(items: Iterable[Expression]) -> Expression:
    """Returns any of the items; empty alternatives are left out."""
    kept = tuple(dict.fromkeys(item for item in items if item != NOTHING))
    return kept[0] if len(kept) == 1 else Choice(kept)


def chain(*items: Expression) -> Expression:
    """Joins items one after the other; NOTHING where one of them matches nothing."""
    kept: list[Expression] = []
    for item in items:
        if type(item) is Choice and not item.items:
            return NOTHING
        for part in item.items if type(item) is Chain else (item,):
            if type(part) is not Text:
                kept.append(part)
            elif kept and type(kept[-1]) is Text:
                kept[-1] = Text(kept[-1].text + part.text)
            elif part.text:
                kept.append(part)
    return kept[0] if len(kept) == 1 else Chain(tuple(kept)) if kept else EMPTY


def repeat(item: Expression, least: int, most: int | None) -> Expression:
    """Repeats an item `least` to `most` times."""
    if most == 0:
        return EMPTY
    return item if (least, most) == (1, 1) else Repeat(item, least, most)


def _digits(first: int, last: int) -> Expression:
    return Text(str(first)) if first == last else _chars("", first, last)


def natural(low: int, high: int) -> Expression:
    """Returns the integers from `low` >= 0 to `high`, without leading zeros."""
    if low > high:
        return NOTHING
    items: list[Expression] = []
    if low == 0:
        items.append(ZERO)
        low = 1
    whole: list[int] = []  # lengths of which there are all numbers
    for length in range(len(str(low)), len(str(high)) + 1):
        smallest, largest = 10 ** (length - 1), 10**length - 1
        if low <= smallest and largest <= high:
            whole.append(length)
        elif low <= high:
            items.append(_between(str(max(low, smallest)), str(min(high, largest))))
    if whole:
        items.append(chain(_digits(1, 9), repeat(DIGIT, whole[0] - 1, whole[-1] - 1)))
    return choice(items)


def _between(low: str, high: str) -> Expression:
    """The digit strings of the length of both, from `low` to `high`."""
    rest = len(low) - 1
    if not low.strip("0") and not high.strip("9"):
        return repeat(DIGIT, rest + 1, rest + 1)
    if low[0] == high[0]:
        return chain(Text(low[0]), _between(low[1:], high[1:]))
    first, last = int(low[0]), int(high[0])
    items: list[Expression] = []
    after: list[Expression] = []
    if low[1:].strip("0"):
        items.append(chain(Text(low[0]), _between(low[1:], "9" * rest)))
        first += 1
    if high[1:].strip("9"):
        after.append(chain(Text(high[0]), _between("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        items.append(chain(_digits(first, last), repeat(DIGIT, rest, rest)))
    return choice(items + after)


class _Limit(NamedTuple):
    """A bound of what stands after the point: digits without zeros at the end, "" = 0."""

    digits: str
    is_open: bool

    def rest(self) -> _Limit:
        return _Limit(self.digits[1:], self.is_open)


ABOVE_ZERO = _Limit("", True)


def _fraction(low: _Limit | None, high: _Limit | None, least: int, most: int) -> Expression:
    """The strings of `least` to `most` digits that are, written behind a point, between the limits; None = no limit."""
    low = None if low == ("", False) else low
    if high is not None and not high.digits:
        return repeat(ZERO, least, most) if low is None and not high.is_open else NOTHING
    if low is None and high is None:
        return repeat(DIGIT, least, most)
    can_end = least == 0 and low is None
    if most == 0:
        return EMPTY if can_end else NOTHING
    first = int(low.digits[0]) if low and low.digits else 0
    last = int(high.digits[0]) if high else 9
    room = max(least - 1, 0), most - 1
    items: list[Expression] = []
    after: list[Expression] = []
    if low and high and first == last:
        items.append(chain(_digits(first, first), _fraction(low.rest(), high.rest(), *room)))
        first += 1
    else:
        if low:
            items.append(chain(_digits(first, first), _fraction(low.rest(), None, *room)))
            first += 1
        if high:
            after.append(chain(_digits(last, last), _fraction(None, high.rest(), *room)))
            last -= 1
    if first <= last:
        items.append(chain(_digits(first, last), repeat(DIGIT, *room)))
    digits = choice(items + after)
    return repeat(digits, 0, 1) if can_end else digits


def _split(bound: Bound) -> tuple[int, _Limit]:
    """The integer part of a bound >= 0, and what is behind the point."""
    whole, _, fraction = format(Decimal(bound.value), "f").partition(".")
    return int(whole), _Limit(fraction.rstrip("0"), bound.is_open)


def small(after: int) -> Expression:
    """Returns numbers between 0 and 1, without a sign; of as many digits behind the first ones that are 0."""
    return chain(Text("0."), repeat(ZERO, 0, after - 1), _digits(1, 9), repeat(DIGIT, 0, after - 1))


def _magnitudes(low: Bound, high: Bound | None, digits: Digits, is_fraction: bool) -> Expression:
    """The texts without a sign of the numbers between bounds >= 0. With `is_fraction` those that are not integers."""
    start, low_limit = _split(low)
    end, high_limit = (10**digits.whole, ABOVE_ZERO) if high is None else _split(high)
    cap = 10**digits.before
    optional = 1 if is_fraction else 0
    least = ABOVE_ZERO if is_fraction else None
    items: list[Expression] = []

    def with_point(whole: Expression, low: _Limit | None, high: _Limit | None, needs_point: int) -> None:
        behind = chain(POINT, _fraction(low, high, 1, digits.after)) if digits.after else NOTHING
        if behind == NOTHING:
            items.append(NOTHING if needs_point else whole)
        else:
            items.append(chain(whole, repeat(behind, needs_point, 1)))

    is_limited = low_limit != ("", False)
    if low == (0, True) and end > 0 and digits.after:
        items.append(small(digits.after))
    elif is_limited and start < cap and start <= end:
        with_point(Text(str(start)), low_limit, high_limit if start == end else None, 1)
    first = start + 1 if is_limited else start
    with_point(natural(first, min(end, cap) - 1), least, None, optional)
    if first <= end < cap and high_limit != ABOVE_ZERO:
        with_point(Text(str(end)), least, high_limit, optional)
    if not is_fraction:
        last = end - 1 if high_limit == ABOVE_ZERO else end
        items.append(natural(max(first, cap), min(last, 10**digits.whole - 1)))
    return choice(items)


def decimals(low: Bound | None, high: Bound | None, digits: Digits, is_fraction: bool = False) -> Expression:
    """Returns the texts of the numbers between the bounds, None = no bound. Neither "-0" nor "-0.0" is one."""
    items: list[Expression] = []
    if high is None or high.value > 0 or high == (0, False):
        items.append(_magnitudes(low if low and low.value >= 0 else Bound(0, False), high, digits, is_fraction))
    if low is None or low.value < 0:
        least = Bound(-high.value, high.is_open) if high and high.value < 0 else Bound(0, True)
        most = None if low is None else Bound(-low.value, low.is_open)
        items.append(chain(MINUS, _magnitudes(least, most, digits, is_fraction)))
    return choice(items)


def integers(low: int, high: int) -> Expression:
    """Returns the integers from `low` to `high`, which is not less."""
    if low == -high:
        return choice([ZERO, chain(repeat(MINUS, 0, 1), natural(1, high))])
    return choice([natural(max(low, 0), high), chain(MINUS, natural(max(1, -high), -low))])


def every_decimal(digits: Digits) -> Expression:
    """Returns the texts of all decimals."""
    fraction = repeat(chain(POINT, repeat(DIGIT, 1, digits.after)), 0, 1)
    whole = chain(repeat(MINUS, 0, 1), natural(1, 10**digits.whole - 1))
    return choice([chain(choice([ZERO, whole]), fraction), chain(MINUS, small(digits.after))])


def multiples(step: int, places: int) -> Expression:
    """Returns an expression that matches those texts of numbers that are multiples of step / 10**places; other strings
    may match or not.

    Raises GrammarError for a step that takes too large an expression.
    """
    tens, left = 1, step
    for prime in (2, 5):
        while left % prime == 0:
            left //= prime
            tens *= prime
    texts = _with_ending(tens, places)
    if left not in SIMPLE_FACTORS:
        raise _too_large(Decimal(step).scaleb(-places))
    return texts if left == 1 else Both(texts, divisible(left))


def _too_large(step: Number) -> GrammarError:
    return GrammarError(
        f'"multipleOf": {step} cannot be enforced for that many numbers; possible are 1, 2, 4, 8, 16, 5, 25, 125, each'
        " also 3 or 7 times, and 10, 100, … or 0.1, 0.01, … times these; and any number where minimum and maximum"
        " leave at most 1000 multiples"
    )


def _with_ending(step: int, places: int) -> Expression:
    """`multiples` for a step without other prime factors than 2 and 5."""
    if step == 1:
        behind = chain(POINT, repeat(DIGIT, 0, places), repeat(ZERO, 0, None))
        return chain(repeat(_chars("-"), 1, None), repeat(behind, 0, 1))
    items = []
    for after in range(places + 1):
        rest = step // math.gcd(step, 10 ** (places - after))
        more = chain(POINT, repeat(ZERO, 0, None)) if places == 0 else repeat(ZERO, 0, None)
        tail = EMPTY if after < places else repeat(more, 0, 1) if places == 0 else more
        items.append(chain(_ending(rest, after), tail))
    return choice(items)


def _ending(step: int, after: int) -> Expression:
    """The texts with `after` digits after the point that are, without the point, multiples of the step."""
    size = next(size for size in itertools.count() if 10**size % step == 0)
    if 10**size // step > MAX_SUFFIXES:
        raise _too_large(step)
    items: list[Expression] = []
    for length in range(after + 1, size):
        items += [_signed(f"{value:0{length}}", after) for value in range(0, 10**length, step)]
    any_before = repeat(_chars("-"), 1, None)
    if size <= after:
        behind = [Text(f"{value:0{size}}") for value in range(0, 10**size, step)] if size else [EMPTY]
        point = POINT if after else EMPTY
        items.append(chain(any_before, point, repeat(DIGIT, after - size, after - size), choice(behind)))
    else:
        texts = [_pointed(f"{value:0{size}}", after) for value in range(0, 10**size, step)]
        items.append(chain(repeat(_chars("-"), 0, None), choice(map(Text, texts))))
    return choice(items)


def _pointed(digits: str, after: int) -> str:
    return f"{digits[: len(digits) - after]}.{digits[len(digits) - after :]}" if after else digits


def _signed(digits: str, after: int) -> Expression:
    return chain(repeat(MINUS, 0, 1), Text(_pointed(digits, after)))


@cache
def divisible(divisor: int) -> Expression:
    """Returns the texts whose digits are a number that can be divided; signs and points are passed over.

    The divisor has no factor 2 or 5, so how many zeros follow does not matter, nor where the point is.
    """
    moves = []
    for state in range(divisor):
        to_next = [(48 + digit, 48 + digit, (10 * state + digit) % divisor) for digit in range(10)]
        moves.append(((45, 46, state), *to_next))
    accepting = tuple(state == 0 for state in range(divisor))
    return regular.expression_of(regular.Automaton(tuple(moves), accepting))
