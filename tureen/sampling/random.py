"""Random numbers as a function of (seed, position) alone: the counter-based generator Philox4x32-10."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
DROPPED_BITS = np.uint64(11)  # a float64 in [0, 1) holds 53 of 64 random bits


def philox4x32(counters: Words, keys: Words) -> Words:
    """Ten rounds of Philox4x32 on counters [n, 4] with keys [n, 2], giving words [n, 4].

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint32) for i in range(4))
    k0, k1 = keys[:, 0].astype(np.uint32), keys[:, 1].astype(np.uint32)
    for _ in range(ROUNDS):
        product0 = c0.astype(np.uint64) * MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * MULTIPLIERS[1]
        c0, c2 = _high(product1) ^ c1 ^ k0, _high(product0) ^ c3 ^ k1
        c1, c3 = product1.astype(np.uint32), product0.astype(np.uint32)
        k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position); seeds are taken modulo 2**64."""
    keys = _words(seeds)
    counters = np.concatenate((_words(positions), np.zeros_like(keys)), axis=1)
    words = philox4x32(counters, keys).astype(np.uint64)
    bits = (words[:, 0] << WORD_BITS | words[:, 1]) >> DROPPED_BITS
    return bits.astype(np.float64) * 2.0**-53


def _high(product: NDArray[np.uint64]) -> Words:
    return (product >> WORD_BITS).astype(np.uint32)


def _words(values: Sequence[int]) -> Words:
    """Integers modulo 2**64 as [n, 2] words, low word first."""
    whole = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)
    return np.stack((whole & LOW_WORD, whole >> WORD_BITS), axis=1).astype(np.uint32)
