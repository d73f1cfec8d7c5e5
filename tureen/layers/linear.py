"""Linear layers; several of a checkpoint's matrices may stand in one, so that they are one product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from tureen.kernels import linear as kernel


class OutputAdapter(Protocol):
    """Adds something of its own to a layer's outputs."""

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """x [tokens, inputs]; out [tokens, outputs] may be changed in place. Returns the sum."""


class Linear:
    """y = x @ weight.T + bias. `parts`: the checkpoint's names of the matrices stacked in it -> their output sizes."""

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
        """Checkpoint name -> where its values go; once they are laid out, a copy of them."""
        first = 0
        weight = kernel.unpack(self.weight)
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", weight[first : first + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[first : first + size]
            first += size

    def finish(self) -> None:
        """All weights are there: lay them out for the device."""
        self.weight = kernel.pack(self.weight, self.bias)
