"""The attention block of the torch model: projects, rotates, attends, projects back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape, Span
from tureen.layers.activation import sigmoid
from tureen.layers.kept_states import KeptStates
from tureen.layers.linear import Linear
from tureen.layers.norm import Norm
from tureen.layers.rotary import Rotation, rotate


class Step(NamedTuple):
    """The values that the layers of one forward pass share."""

    attention: AttentionBackend
    rope: tuple[Rotation, ...]  # per table: those of this step's tokens
    growth: Tensor | None = None  # float32 [tokens, 1, 1]: what queries are multiplied by
    spans: tuple[Span, ...] = ()
    states: KeptStates | None = None  # of layers without attention

    @property
    def recurrent(self) -> KeptStates:
        """The states of layers without attention, in a model that has such layers."""
        assert self.states is not None
        return self.states


class Attention:
    """Grouped-query attention (arXiv:2305.13245)."""

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
        self._sinks = torch.empty(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
        self._gate: Linear | None = None
        self._qk_norm: tuple[Norm, Norm] | None = None
        self._norms_together = self._norms_last = False

    def add_gate(self, gate: Linear) -> None:
        """Multiplies what each head gives by the sigmoid of this layer's outputs from now on."""
        self._gate = gate

    def normalise(self, q_norm: Norm, k_norm: Norm, *, are_together: bool, is_last: bool) -> None:
        """Applies these norms to q and k from now on.

        are_together: to all heads together, else to each. is_last: after the rotation, else before it.
        """
        self._qk_norm = q_norm, k_norm
        self._norms_together, self._norms_last = are_together, is_last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        heads, kv_heads, _ = self._sizes
        qkv = self._qkv(x).view(x.shape[0], -1, self._shape.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if not self._norms_last:
            q, k = self._normed(q, k)
        if self._rope is not None:
            q, k = (rotate(vectors, step.rope[self._rope]) for vectors in (q, k))
        if self._norms_last:
            q, k = self._normed(q, k)
        if step.growth is not None:
            q = (q * step.growth).to(q.dtype)
        mixed = step.attention.forward(q, k, v, self._layer, self._sinks)
        return self._out(mixed if self._gate is None else mixed * sigmoid(self._gate(x)))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self._qk_norm is None:
            return q, k
        q_norm, k_norm = self._qk_norm
        if self._norms_together:
            return q_norm(q.flatten(1)).view(q.shape), k_norm(k.flatten(1)).view(k.shape)
        return q_norm(q), k_norm(k)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(prefix)
        if self._gate is not None:
            yield from self._gate.weights(prefix)
        if self._sinks is not None:
            yield f"{prefix}sinks", self._sinks
        if self._qk_norm is not None:
            yield from self._qk_norm[0].weights(f"{prefix}q_norm")
            yield from self._qk_norm[1].weights(f"{prefix}k_norm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._qkv
        yield prefix, self._out

    def finish(self) -> None:
        if self._gate is not None:
            self._gate.finish()
        self._qkv.finish()
        self._out.finish()
