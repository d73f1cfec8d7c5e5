"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), its tables and its scalings."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor


class RopeConfig(msgspec.Struct, frozen=True):
    """Base frequency and scaling. `kind`: default, linear (positions divided by factor) or llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class RopeTable:
    """cos and sin for every position, in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(context_len, dtype=torch.float32), _frequencies(config, head_dim))
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [tokens] -> cos and signed sin, each [tokens, 1, head_dim]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]: each pair (x[i], x[i + head_dim / 2]) turned by its angle; in float32."""
    wide = x.float()
    return wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin).addcmul_(wide, cos).to(x.dtype)


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those shorter
    than original_context / high_freq_factor are kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((config.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / config.factor + kept * frequencies
