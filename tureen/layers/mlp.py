"""The feed-forward block, with a gate (Shazeer 2020, arXiv:2002.05202) or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tureen.kernels.fused import FusedKernels
from tureen.layers.activation import GATED, PLAIN, Xielu
from tureen.layers.linear import Linear


class MLP:
    """Computes down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    bias: of gate and up; down_bias: of down. scales: factors of gate(x) and of the result.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        activation: str,
        *,
        has_gate: bool,
        bias: bool,
        down_bias: bool,
        dtype: torch.dtype,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        parts = {"gate_proj": size, "up_proj": size} if has_gate else {"up_proj": size}
        self._into = Linear(hidden_size, parts, bias=bias, dtype=dtype)
        self._down = Linear(size, {"down_proj": hidden_size}, bias=down_bias, dtype=dtype)
        self._size = size
        self._gate_scale, self._scale = scales
        self._cutoff: float | None = None
        self._has_gate, self._activation_name = has_gate, activation
        self._activation: Callable[[Tensor], Tensor] = (
            Xielu() if activation == "xielu" else (GATED if has_gate else PLAIN)[activation]
        )

    def fuse(self, kernels: FusedKernels) -> None:
        """Computes a gated activation by a fused kernel from now on, if there is one for it."""
        if self._has_gate and self._activation_name in kernels.activations:
            self._activation = lambda x: kernels.activate_and_mul(x, self._activation_name)

    def cut_gates(self, cutoff: float) -> None:
        """Subtracts mean + `cutoff` standard deviations from gates, and sets negative gates to 0."""
        self._cutoff = cutoff

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._into(x)
        if self._gate_scale != 1:
            inner[:, : self._size].mul_(self._gate_scale)
        if self._cutoff is not None:
            gate = inner[:, : self._size]
            deviation, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
            gate.sub_(mean + deviation * self._cutoff).relu_()
        result = self._down(self._activation(inner))
        return result if self._scale == 1 else result * self._scale

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._into.weights(prefix)
        yield from self._down.weights(prefix)
        if isinstance(self._activation, Xielu):
            yield from self._activation.weights(f"{prefix}act_fn")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._into
        yield prefix, self._down

    def finish(self) -> None:
        self._into.finish()
        self._down.finish()
