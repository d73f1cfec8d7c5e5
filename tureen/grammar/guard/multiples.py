"""The digits with which a number that is being written becomes a multiple."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor, gcd

MAX_REST = 24
"""The most characters that are looked for."""


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
