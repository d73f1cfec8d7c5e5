"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tureen.layers.rope import RopeConfig, axes, frequencies


class Rotation(NamedTuple):
    """The rotations of a step's tokens: cos and signed sin, each [tokens, 1, rotated dimensions]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool


class RopeTable:
    """Tables of cos and sin for every position, in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> None:
        positions = torch.arange(context_len, dtype=torch.float32)
        angles = torch.outer(positions, torch.from_numpy(frequencies(config, head_dim, context_len)))
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).mul_(config.magnitude).to(device)
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).mul_(config.magnitude).to(device)
        self._is_interleaved = config.is_interleaved
        turned = torch.from_numpy(axes(config, head_dim)).long()
        self._axes = torch.cat((turned, turned)).to(device)  # of each column; empty: the position turns all

    def at(self, positions: Tensor, places: Tensor | None = None) -> Rotation:
        """Returns the rotations at positions int64 [tokens], or at places int64 [tokens, 3]: frames, rows, columns."""
        if places is None or not len(self._axes):
            cos, sin = (table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
        else:
            rows = places[:, self._axes]
            cos, sin = (table.gather(0, rows)[:, None] for table in (self._cos, self._sin))
        return Rotation(cos, sin, self._is_interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates x [tokens, heads, head_dim], computed in float32.

    Of the first n dimensions, as many as cos has, each pair (x[i], x[i + n / 2]) is turned by its angle. Interleaved
    pairs (x[2i], x[2i + 1]) are first moved to those places: products of queries and keys stay the same.
    """
    cos, sin, is_interleaved = rotation
    size = cos.shape[-1]
    wide = x[..., :size].float()
    if is_interleaved:
        wide = torch.cat((wide[..., ::2], wide[..., 1::2]), dim=-1)
    turned = wide.roll(size // 2, dims=-1).mul_(sin).addcmul_(wide, cos).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)
