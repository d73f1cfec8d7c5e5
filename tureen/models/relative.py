"""Buckets of distances between tokens (arXiv:1910.10683, section 2.1): small distances have their own."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FARTHEST = 128
"""Distances from here on share the last bucket of their direction."""


def buckets(distances: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns the bucket, below `count`, of each distance from a token to one that it sees."""
    half = count // 2
    size = np.abs(distances)
    exact = half // 2
    steps = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(FARTHEST / exact))
    far = np.minimum(exact + (steps * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(distances > 0, half, 0) + np.where(size < exact, size, far)
