"""Compares JSON texts of which one is still being written, however either spells its numbers and spaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

SCANNED = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?[0-9][0-9.eE+-]*|-|[a-z]+|[\[\]{},:]', re.DOTALL)
"""The parts of a JSON text without the spaces between them; the last may have only begun."""
NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?")
ZERO = (0, 1)
ALWAYS_ZERO = re.compile(rb"-?0(?:\.0*)?[eE]")


class Parts(NamedTuple):
    """The parts of a text as they are spelled, and as they are compared: what is equal is the same there."""

    spelled: tuple[bytes, ...]
    compared: tuple[bytes | tuple[int, int], ...]


def may_become(text: bytes, others: Sequence[bytes]) -> bool:
    """Returns whether a text that goes on may become equal to one of some others, which are whole: also where it is
    equal so far, and goes on or not."""
    if any(other.startswith(text) for other in others):
        return True
    left, begun = list(map(_parts, others)), None
    for at, match in enumerate(SCANNED.finditer(text), -1):
        if begun is not None:  # what is before another part is whole
            value = _compared(begun)
            left = [other for other in left if at < len(other.compared) and other.compared[at] == value]
            if not left:
                return False
        begun = match.group()
    if begun is None:
        return True
    at, value = at + 1, _compared(begun)
    return any(
        at < len(other.spelled) and (other.compared[at] == value or other.spelled[at].startswith(begun))
        for other in left
    )


def is_zero_for_good(text: bytes) -> bool:
    """Returns whether a number that begins so is zero, whatever digits follow: its exponent has begun."""
    return ALWAYS_ZERO.match(text) is not None


def has_zero(text: bytes) -> bool:
    """Returns whether one of the numbers of a text is zero."""
    return ZERO in _parts(text).compared


@lru_cache(maxsize=64)
def _parts(text: bytes) -> Parts:
    spelled = tuple(SCANNED.findall(text))
    return Parts(spelled, tuple(map(_compared, spelled)))


@lru_cache(maxsize=4096)
def _compared(part: bytes) -> bytes | tuple[int, int]:
    """Returns a number's value as a fraction; of one that has only begun, as far as it is a number. All else is spelled
    in one way."""
    number = NUMBER.match(part)
    return part if number is None else Fraction(number.group().decode()).as_integer_ratio()
