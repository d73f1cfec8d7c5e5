"""Linear layers; several of a checkpoint's matrices may stand in one, so that they are one product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from tureen.kernels import linear as kernel


class OutputAdapter(Protocol):
    """Adds its own product to a layer's outputs, as a low-rank adapter does."""

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Returns out plus the adapter's product of x.

        x [tokens, inputs]; out [tokens, outputs] may be changed in place.
        """


class Linear:
    """Computes y = x @ weight.T + bias. `parts`: the checkpoint's names of the matrices stacked in it -> their output
    sizes."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        self.parts = dict(parts)
        self.dtype = dtype
        self.adapters: OutputAdapter | None = None
        self.weight = torch.empty(sum(parts.values()), in_features, dtype=dtype)
        self.bias = torch.empty(sum(parts.values()), dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        out = kernel.linear(x, self.weight, self.bias)
        return out if self.adapters is None else self.adapters.add(x, out)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yields each weight's name in checkpoints, and the tensor that its values go into; after `finish`, a copy of
        them."""
        first = 0
        weight = kernel.unpack(self.weight)
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", weight[first : first + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[first : first + size]
            first += size

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        self.weight = kernel.pack(self.weight, self.bias)
