"""Stretches and shrinks grids of vectors: bilinear and bicubic, without a blur."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.vision.arrays import Array, Arrays

BEND = -0.75
"""The cubic's parameter: the slope of its outer part at 1 (Keys 1981, DOI 10.1109/TASSP.1981.1163711)."""


class Taps(NamedTuple):
    """The old places along an axis that make each new one, and their factors: [taps, new places] both."""

    places: NDArray[np.int64]
    factors: NDArray[np.float32]


def linear_taps(old: int, new: int, *, keeps_ends: bool = False) -> Taps:
    """Returns two taps for each of `new` places. keeps_ends: the first and the last place stay, else the borders."""
    centres = _centres(old, new).clip(min=0)
    if keeps_ends:
        centres = np.arange(new) * ((old - 1) / max(1, new - 1))
    first = np.floor(centres)
    return _taps(first, np.stack([1 - (centres - first), centres - first]), old, 0)


def cubic_taps(old: int, new: int) -> Taps:
    """Returns four taps for each of `new` places; the borders stay."""
    centres = _centres(old, new)
    first = np.floor(centres)
    after = centres - first
    inner = [((BEND + 2) * x - (BEND + 3)) * x * x + 1 for x in (after, 1 - after)]
    outer = [BEND * (((x - 5) * x + 8) * x - 4) for x in (1 + after, 2 - after)]
    return _taps(first, np.stack([outer[0], *inner, outer[1]]), old, -1)


def resampled(arrays: Arrays, grids: Array, down: Taps, across: Taps) -> Array:
    """Resamples grids [rows, columns, size], or several: [grids, rows, columns, size]."""
    axis = len(grids.shape) - 3
    return arrays.narrowed(_along(arrays, _along(arrays, grids, down, axis), across, axis + 1))


def _along(arrays: Arrays, values: Array, taps: Taps, axis: int) -> Array:
    old = values.swapaxes(0, axis)
    ones = [1] * (len(old.shape) - 1)
    places, factors = arrays.constant(taps.places), arrays.constant(taps.factors)
    new = old[places[0]] * factors[0].reshape(-1, *ones)
    for place, factor in zip(places[1:], factors[1:], strict=True):
        new += old[place] * factor.reshape(-1, *ones)
    return new.swapaxes(0, axis)


def _centres(old: int, new: int) -> NDArray[np.float64]:
    """Returns the places among the old ones where the new ones are, when both have the same borders."""
    return (np.arange(new, dtype=np.float64) + 0.5) * (old / new) - 0.5


def _taps(first: NDArray[np.float64], factors: NDArray[np.float64], old: int, begin: int) -> Taps:
    places = first.astype(np.int64) + np.arange(begin, begin + len(factors))[:, None]
    return Taps(places.clip(0, old - 1), factors.astype(np.float32))
