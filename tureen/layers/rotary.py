"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tureen.layers.rope import RopeConfig, frequencies


class RopeTable:
    """cos and sin for every position, in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        positions = torch.arange(context_len, dtype=torch.float32)
        angles = torch.outer(positions, torch.from_numpy(frequencies(config, head_dim)))
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [tokens] -> cos and signed sin, each [tokens, 1, head_dim]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]: each pair (x[i], x[i + head_dim / 2]) turned by its angle; in float32."""
    wide = x.float()
    return wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin).addcmul_(wide, cos).to(x.dtype)
