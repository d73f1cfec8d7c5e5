"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tureen.layers.rope import RopeConfig, frequencies


class RopeTable:
    """Tables of cos and sin for every position, in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        positions = torch.arange(context_len, dtype=torch.float32)
        angles = torch.outer(positions, torch.from_numpy(frequencies(config, head_dim, context_len)))
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).mul_(config.magnitude).to(device)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).mul_(config.magnitude).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and signed sin at positions int64 [tokens]: each [tokens, 1, rotated dimensions]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [tokens, heads, head_dim], computed in float32.

    Of the first n dimensions, as many as cos has, each pair (x[i], x[i + n / 2]) is turned by its angle.
    """
    size = cos.shape[-1]
    wide = x[..., :size].float()
    turned = wide.roll(size // 2, dims=-1).mul_(sin).addcmul_(wide, cos).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)
