"""Rotary frequencies (Su et al. 2021, arXiv:2104.09864) and their scalings. No torch."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeConfig(msgspec.Struct, frozen=True):
    """Base frequency and scaling of a rope. `kind`: default, linear (positions divided by factor), llama3 or
    longrope."""

    theta: float
    kind: str = "default"
    share: float = 1.0  # of a head's dimensions, the first, that are rotated
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0  # what is rotated is also multiplied by it


def frequencies(config: RopeConfig, head_dim: int, context_len: int) -> NDArray[np.float32]:
    """Returns the rotary frequencies in radians per position, float32 [rotated dimensions / 2].

    context_len: the longest context of this server, on which longrope depends.
    """
    size = int(head_dim * config.share)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    powers = np.power(config.theta, exponents, dtype=np.float64)
    plain = np.asarray(np.float32(1) / powers.astype(np.float32), np.float64)  # rounded twice, as torch does
    if config.kind == "linear":
        plain /= config.factor
    elif config.kind == "llama3":
        plain = _llama3(plain, config)
    elif config.kind == "longrope":
        plain = _longrope(powers, config, context_len)
    return np.asarray(plain, np.float32)


def _llama3(plain: NDArray[np.float64], config: RopeConfig) -> NDArray[np.float64]:
    """Scales frequencies as Llama 3.1 does (arXiv:2407.21783).

    Wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those shorter than
    original_context / high_freq_factor are kept, those between are blended.
    """
    wavelengths = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((config.original_context / wavelengths - low) / (high - low)).clip(0, 1)
    return np.asarray((1 - kept) * plain / config.factor + kept * plain)


def _longrope(powers: NDArray[np.float64], config: RopeConfig, context_len: int) -> NDArray[np.float64]:
    """Scales frequencies by LongRoPE (arXiv:2402.13753): each is divided by its own factor.

    There is one list of factors for contexts as trained at first and one for longer ones. Which one holds is decided
    once for a server: keys in the cache must agree with later queries.
    """
    factors = config.long_factors if context_len > config.original_context else config.short_factors
    return np.asarray(1 / (np.asarray(factors, np.float32) * powers.astype(np.float32)), np.float64)
