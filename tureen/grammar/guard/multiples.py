"""Numbers that must be multiples, while they are being written."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, gcd

from tureen.grammar.number_digits import EXACT_DIGITS, MAX_DIGITS

MAX_REST = 24
"""The most characters that are looked for."""


def is_multiple(text: bytes, step: tuple[int, int]) -> bool:
    """Returns whether a number is a multiple of step[0] / 10 ** step[1]."""
    factor, scale = step
    whole, _, decimals = text.partition(b".")
    if len(decimals) <= scale and (whole + decimals).lstrip(b"-").isdigit():
        return bool(int(whole + decimals) * 10 ** (scale - len(decimals)) % factor == 0)
    try:
        number = Fraction(text.decode())
    except ValueError:
        return False
    return bool((number * 10**scale) % factor == 0)


def can_be_multiple(text: bytes, step: tuple[int, int], bounds: tuple[str | None, str | None]) -> bool:
    """Returns whether a number that begins so can become a multiple, without an exponent or more decimals than one has.

    Decimals and exponents that would be right by chance are given up: so a number can always be ended.
    """
    factor, scale = step
    is_negative = text.startswith(b"-")
    digits = text[1:] if is_negative else text
    whole, point, decimals = digits.partition(b".")
    if len(decimals) > scale or (point and not scale) or not (whole + decimals).isdigit():
        return not digits
    low, high, most_digits = _limits(scale, bounds)
    if is_negative:
        low, high = (None if high is None else -high), (None if low is None else -low)
    value = int(whole + decimals)
    if point:
        last_size = size = scale - len(decimals)
    elif value:
        last_size, size = scale, scale + max(0, most_digits - len(whole))
    else:
        last_size = size = scale
    while size >= last_size:  # from the largest on, where there is most likely one
        least, most = value * 10**size, (value + 1) * 10**size - 1
        if is_negative and not least:
            least = 1  # there is no -0
        if low is not None and low > least:
            least = low
        if high is not None and high < most:
            most = high
        if most // factor * factor >= least:
            return True
        size -= 1
    return False


@lru_cache(maxsize=256)
def _limits(scale: int, bounds: tuple[str | None, str | None]) -> tuple[int | None, int | None, int]:
    """Returns the bounds in units of the last decimal, and how many digits a number surely may have before the point:
    the grammar does not know longer ones."""
    low, high = (None if bound is None else Fraction(bound) for bound in bounds)
    sizes = [len(str(abs(int(bound)))) for bound in (low, high) if bound is not None]
    return (
        None if low is None else ceil(low * 10**scale),
        None if high is None else floor(high * 10**scale),
        max([EXACT_DIGITS - scale if scale else MAX_DIGITS, *sizes]),
    )


def shortest_rest(text: bytes, step: tuple[int, int], bounds: tuple[str | None, str | None]) -> bytes:
    """Returns the fewest characters with which a number that begins so becomes a multiple of step[0] / 10 ** step[1]
    within the bounds; b"" where it is one, and where none are found."""
    factor, scale = step
    is_negative = text.startswith(b"-")
    whole, point, decimals = text.lstrip(b"-").partition(b".")
    if not whole.isdigit() or len(decimals) > scale:
        return b""
    low, high = (None if bound is None else Fraction(bound) * 10**scale for bound in bounds)
    if is_negative:
        low, high = (None if high is None else -high), (None if low is None else -low)
    for size in range(MAX_REST + 1):
        forms = _forms(size, scale - len(decimals), has_point=bool(point), is_zero=whole == b"0")
        for num_whole, num_decimals in forms:
            count = num_whole + num_decimals
            unit = 10 ** (scale - len(decimals) - num_decimals)
            first = int(whole + decimals) * 10**count
            least = max(first, int(is_negative), 0 if low is None else ceil(low / unit))
            most = first + 10**count - 1 if high is None else min(first + 10**count - 1, floor(high / unit))
            every = factor // gcd(factor, unit)
            number = -(-least // every) * every
            if number <= most:
                digits = str(number - first).zfill(count) if count else ""
                dot = "." if num_decimals and not point else ""
                return (digits[:num_whole] + dot + digits[num_whole:]).encode()
    return b""


def _forms(size: int, most_decimals: int, *, has_point: bool, is_zero: bool) -> Iterator[tuple[int, int]]:
    """Yields, for a number of characters, how many digits stand before the point and how many after it."""
    if has_point:
        if size <= most_decimals:
            yield 0, size
        return
    if not (is_zero and size):
        yield size, 0
    for num_decimals in range(1, min(most_decimals, size - 1) + 1):
        num_whole = size - 1 - num_decimals
        if not (is_zero and num_whole):
            yield num_whole, num_decimals
