"""The attention block of the torch model: projects, rotates, attends, projects back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, HeadNorms, LayerShape, RotatingBackend, Span
from tureen.layers.activation import sigmoid
from tureen.layers.kept_states import KeptStates
from tureen.layers.linear import Linear
from tureen.layers.norm import Norm, RMSNorm
from tureen.layers.rotary import Rotation, rotate


class Step(NamedTuple):
    """The values that the layers of one forward pass share."""

    attention: AttentionBackend
    rope: tuple[Rotation, ...]  # per table: those of this step's tokens
    growth: Tensor | None = None  # float32 [tokens, 1, 1]: what queries are multiplied by
    spans: tuple[Span, ...] = ()
    states: KeptStates | None = None  # of layers without attention
    layer_inputs: Tensor | None = None  # [tokens, layers, size]; see LayerInputs
    rotating: RotatingBackend | None = None  # the same backend, if it can rotate

    @property
    def recurrent(self) -> KeptStates:
        """The states of layers without attention, in a model that has such layers."""
        assert self.states is not None
        return self.states


class Attention:
    """Grouped-query attention (arXiv:2305.13245).

    layer: the place of its keys and values in the attention backend. names: of the matrices of its input. Without
    v_proj, values are the keys before their norm. Without k_proj as well, the layer uses the keys and values stored
    there.
    """

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
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        self._layer = layer
        self._shape = shape
        self._rope = rope  # index into Step.rope; None = positions do not turn q and k
        self._sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        parts = {name: heads * shape.head_dim for name, heads in zip(names, self._sizes, strict=False)}
        self._qkv = Linear(hidden_size, parts, bias=qkv_bias, dtype=dtype)
        self._out = Linear(shape.num_heads * shape.head_dim, {"o_proj": hidden_size}, bias=out_bias, dtype=dtype)
        self._sinks = torch.empty(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
        self._gate: Linear | None = None
        self._q_norm: Norm | None = None
        self._k_norm: Norm | None = None
        self._v_norm: Norm | None = None
        self._norms_together = self._norms_last = False

    def add_gate(self, gate: Linear) -> None:
        """Multiplies what each head gives by the sigmoid of this layer's outputs from now on."""
        self._gate = gate

    def normalise(self, q_norm: Norm, k_norm: Norm | None, *, are_together: bool, is_last: bool) -> None:
        """Applies these norms to q and k from now on.

        k_norm: None where keys are another layer's. are_together: to all heads together, else to each. is_last: after
        the rotation, else before it.
        """
        self._q_norm, self._k_norm = q_norm, k_norm
        self._norms_together, self._norms_last = are_together, is_last

    def normalise_values(self, norm: Norm) -> None:
        """Applies this norm to each head's values from now on."""
        self._v_norm = norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        heads, kv_heads, _ = self._sizes
        stacked = self._qkv(x)
        if step.rotating is not None and self._rope is not None and self._is_usual and step.growth is None:
            q = step.rotating.store_rotated(stacked, self._layer, step.rope[self._rope], self._head_norms())
            return self._ended(x, step.attention.forward(q, None, None, self._layer, self._sinks))
        qkv = stacked.view(x.shape[0], -1, self._shape.head_dim)
        q = self._placed(qkv[:, :heads], self._q_norm, step)
        if step.growth is not None:
            q = (q * step.growth).to(q.dtype)
        k = v = None
        if qkv.shape[1] > heads:
            v = qkv[:, -kv_heads:]  # without v_proj, the keys before their norm
            v = v if self._v_norm is None else self._v_norm(v)
            k = self._placed(qkv[:, heads : heads + kv_heads], self._k_norm, step)
        return self._ended(x, step.attention.forward(q, k, v, self._layer, self._sinks))

    @property
    def _is_usual(self) -> bool:
        """Whether values are projected and have no norm, and each head's queries and keys have a norm or none."""
        if self._v_norm is not None or len(self._qkv.parts) != len(self._sizes):
            return False
        norms = (self._q_norm, self._k_norm)
        return norms == (None, None) or (
            all(isinstance(norm, RMSNorm) for norm in norms) and not (self._norms_together or self._norms_last)
        )

    def _head_norms(self) -> HeadNorms | None:
        if not isinstance(self._q_norm, RMSNorm) or not isinstance(self._k_norm, RMSNorm):
            return None
        weight, eps = self._q_norm.parameters
        return HeadNorms(weight, self._k_norm.parameters[0], eps)

    def _ended(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Returns the layer's result for what attention gave."""
        return self._out(mixed if self._gate is None else mixed * sigmoid(self._gate(x)))

    def _placed(self, vectors: Tensor, norm: Norm | None, step: Step) -> Tensor:
        """Returns queries or keys [tokens, heads, head_dim] normalised and rotated."""
        if norm is not None and not self._norms_last:
            vectors = self._normed(vectors, norm)
        if self._rope is not None:
            vectors = rotate(vectors, step.rope[self._rope])
        return self._normed(vectors, norm) if norm is not None and self._norms_last else vectors

    def _normed(self, vectors: Tensor, norm: Norm) -> Tensor:
        return norm(vectors.flatten(1)).view(vectors.shape) if self._norms_together else norm(vectors)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._qkv.weights(prefix)
        yield from self._out.weights(prefix)
        if self._gate is not None:
            yield from self._gate.weights(prefix)
        if self._sinks is not None:
            yield f"{prefix}sinks", self._sinks
        for name, norm in (("q_norm", self._q_norm), ("k_norm", self._k_norm)):
            if norm is not None:
                yield from norm.weights(f"{prefix}{name}")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._qkv
        yield prefix, self._out
        if self._gate is not None:
            yield prefix, self._gate

    def finish(self) -> None:
        if self._gate is not None:
            self._gate.finish()
        self._qkv.finish()
        self._out.finish()
