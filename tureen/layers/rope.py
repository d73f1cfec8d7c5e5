"""Rotary frequencies (Su et al. 2021, arXiv:2104.09864) and their scalings. No torch."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeConfig(msgspec.Struct, frozen=True):
    """Base frequency and scaling of a rope. `kind`: default, linear (positions divided by factor), llama3, longrope,
    yarn, or proportional (pairs span all dimensions; only the first `share` of them turns)."""

    theta: float
    kind: str = "default"
    share: float = 1.0  # of a head's dimensions, the first, that are rotated
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0  # yarn: turns within original_context from which a frequency is kept
    beta_slow: float = 1.0  # yarn: turns up to which a frequency is divided by factor
    truncate: bool = True  # yarn: the ends of the ramp between the two are whole numbers
    magnitude: float = 1.0  # rotated vectors are also multiplied by it
    is_interleaved: bool = False  # pairs are neighbours, (x[2i], x[2i + 1]), not (x[i], x[i + half])
    sections: tuple[int, ...] = ()  # pairs that turn with a token's frame, row and column (arXiv:2409.12191)
    sections_alternate: bool = False  # pairs turn with the three in turn, instead of one after another


def frequencies(config: RopeConfig, head_dim: int, context_len: int) -> NDArray[np.float32]:
    """Returns the rotary frequencies in radians per position, float32 [rotated dimensions / 2].

    context_len: the longest context of this server, on which longrope depends.
    """
    size = head_dim if config.kind == "proportional" else int(head_dim * config.share)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    powers = np.power(config.theta, exponents, dtype=np.float64)
    plain = np.asarray(np.float32(1) / powers.astype(np.float32), np.float64)  # rounded twice, as torch does
    if config.kind == "linear":
        plain /= config.factor
    elif config.kind == "proportional":
        plain[int(config.share * head_dim // 2) :] = 0
    elif config.kind == "llama3":
        plain = _llama3(plain, config)
    elif config.kind == "longrope":
        plain = _longrope(powers, config, context_len)
    elif config.kind == "yarn":
        plain = _yarn(powers.astype(np.float32), config)
    return np.asarray(plain, np.float32)


def axes(config: RopeConfig, head_dim: int) -> NDArray[np.uint8]:
    """Returns the axis of each pair: 0 = the token's frame, 1 = its row, 2 = its column. Empty for a rope without
    sections: the position turns all pairs."""
    if not config.sections:
        return np.zeros(0, np.uint8)
    if not config.sections_alternate:
        return np.repeat(np.arange(3, dtype=np.uint8), config.sections)
    turned = np.zeros(int(head_dim * config.share) // 2, np.uint8)
    for axis in (1, 2):
        turned[axis : 3 * config.sections[axis] : 3] = axis
    return turned


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


def _yarn(powers: NDArray[np.float32], config: RopeConfig) -> NDArray[np.float64]:
    """Scales frequencies by YaRN (arXiv:2309.00071, section 3.2).

    Frequencies that turn often within the original context are kept, slow ones are divided by `factor`, and a ramp
    over the dimensions blends those between.
    """
    size = 2 * len(powers)

    def dimension(turns: float) -> float:
        """Returns the dimension whose frequency makes this number of turns within the original context."""
        return size * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    divided = ((np.arange(len(powers)) - low) / width).clip(0, 1)
    plain = np.asarray(1 / powers, np.float64)
    return np.asarray(plain / config.factor * divided + plain * (1 - divided))
