"""Random numbers as a function of (seed, position) alone: the counter-based generator Philox4x32-10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Word = Any
"""An integer below 2**32, or an array of such integers as uint64."""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_WORD = 0xFFFFFFFF
FEW = 12  # up to as many numbers, plain integers are faster than arrays


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Computes ten rounds of Philox4x32 for a counter of four words and a key of two; returns four words.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = product1 >> 32 ^ c1 ^ k0, product0 >> 32 ^ c3 ^ k1
        c1, c3 = product1 & LOW_WORD, product0 & LOW_WORD
        k0, k1 = k0 + KEY_STEPS[0] & LOW_WORD, k1 + KEY_STEPS[1] & LOW_WORD
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Returns one number in [0, 1) with 53 random bits for each (seed, position); seeds are taken modulo 2**64."""
    if len(seeds) <= FEW:
        return np.array([_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)], np.float64)
    low_keys, high_keys = _words(seeds)
    low, high = _words(positions)
    zero = np.zeros_like(low)
    first, second, _, _ = philox4x32((low, high, zero, zero), (low_keys, high_keys))
    bits: NDArray[np.uint64] = first << 21 | second >> 11  # a float64 in [0, 1) holds 53 of 64 random bits
    return bits.astype(np.float64) * 2.0**-53


def _uniform(seed: int, position: int) -> float:
    counter = position & LOW_WORD, position >> 32 & LOW_WORD, 0, 0
    first, second, _, _ = philox4x32(counter, (seed & LOW_WORD, seed >> 32 & LOW_WORD))
    bits: int = first << 21 | second >> 11
    return bits * 2.0**-53


def _words(values: Sequence[int]) -> tuple[Word, Word]:
    """Integers modulo 2**64 as their low and their high words."""
    whole = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)
    return whole & LOW_WORD, whole >> 32
