"""The gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tureen.layers.activation import GATED
from tureen.layers.linear import Linear


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)).

    bias: of gate and up; down_bias: of down.
    """

    def __init__(
        self, hidden_size: int, size: int, activation: str, *, bias: bool, down_bias: bool, dtype: torch.dtype
    ) -> None:
        self._gate_up = Linear(hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias, dtype=dtype)
        self._down = Linear(size, {"down_proj": hidden_size}, bias=down_bias, dtype=dtype)
        self._activation = GATED[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._gate_up(x)))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._gate_up.weights(prefix)
        yield from self._down.weights(prefix)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._gate_up
        yield prefix, self._down

    def finish(self) -> None:
        self._gate_up.finish()
        self._down.finish()
