"""The attention block of the torch model: projects, rotates, attends, projects back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape
from tureen.layers.linear import Linear
from tureen.layers.norm import RMSNorm
from tureen.layers.rotary import rotate


class Step(NamedTuple):
    """The values that the layers of one forward pass share."""

    attention: AttentionBackend
    rope: tuple[tuple[Tensor, Tensor], ...]  # per table: cos and sin of this step's tokens


class Attention:
    """Grouped-query attention (arXiv:2305.13245); q and k normalised per head where `qk_norm` names how."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        shape: LayerShape,
        *,
        rope: int | None,
        qkv_bias: bool,
        out_bias: bool,
        dtype: torch.dtype,
    ) -> None:
        self._layer = layer
        self._shape = shape
        self._rope = rope  # index into Step.rope; None = positions do not turn q and k
        self._sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        names = ("q_proj", "k_proj", "v_proj")
        parts = {name: heads * shape.head_dim for name, heads in zip(names, self._sizes, strict=True)}
        self._qkv = Linear(hidden_size, parts, bias=qkv_bias, dtype=dtype)
        self._out = Linear(shape.num_heads * shape.head_dim, {"o_proj": hidden_size}, bias=out_bias, dtype=dtype)
        self._qk_norm: tuple[RMSNorm, RMSNorm] | None = None

    def normalise_heads(self, q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        """Applies these norms to each head of q and k before the rotation."""
        self._qk_norm = q_norm, k_norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        heads, kv_heads, _ = self._sizes
        qkv = self._qkv(x).view(x.shape[0], -1, self._shape.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self._qk_norm is not None:
            q, k = self._qk_norm[0](q), self._qk_norm[1](k)
        if self._rope is not None:
            q, k = (rotate(vectors, *step.rope[self._rope]) for vectors in (q, k))
        return self._out(step.attention.forward(q, k, v, self._layer))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(prefix)
        if self._qk_norm is not None:
            yield from self._qk_norm[0].weights(f"{prefix}q_norm")
            yield from self._qk_norm[1].weights(f"{prefix}k_norm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._qkv
        yield prefix, self._out

    def finish(self) -> None:
        self._qkv.finish()
        self._out.finish()
