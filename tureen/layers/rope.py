"""Rotary frequencies (Su et al. 2021, arXiv:2104.09864) and their scalings. No torch."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeConfig(msgspec.Struct, frozen=True):
    """Base frequency and scaling. `kind`: default, linear (positions divided by factor) or llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def frequencies(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """float32 [head_dim / 2]: radians per position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(config.theta, exponents, dtype=np.float64)
    plain = np.asarray(np.float32(1) / powers.astype(np.float32), np.float64)  # rounded twice, as torch does
    if config.kind == "linear":
        plain /= config.factor
    elif config.kind == "llama3":
        plain = _llama3(plain, config)
    return np.asarray(plain, np.float32)


def _llama3(plain: NDArray[np.float64], config: RopeConfig) -> NDArray[np.float64]:
    """Llama 3.1: wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those shorter
    than original_context / high_freq_factor are kept, those between are blended."""
    wavelengths = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((config.original_context / wavelengths - low) / (high - low)).clip(0, 1)
    return np.asarray((1 - kept) * plain / config.factor + kept * plain)
