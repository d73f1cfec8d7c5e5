"""Applies low-rank adapters to linear layers, in torch: tokens of one step may use different ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.kernels import linear as kernel
from tureen.layers.linear import Linear
from tureen.lora.adapter import Adapter


class AdapterTokens(NamedTuple):
    """The tokens of a step that use the same adapter."""

    number: int
    tokens: Tensor  # int64 [tokens]


class AdapterFactors(NamedTuple):
    """The factors of the matrix that an adapter adds to some of a layer's outputs, as `pack` laid them out."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]
    first: int  # of the outputs


class LayerAdapters:
    """Adds the products of the loaded adapters to one linear layer's outputs."""

    def __init__(self, step: StepAdapters) -> None:
        self._step = step
        self.pieces: dict[int, list[AdapterFactors]] = {}  # by adapter

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds the adapters' products to a layer's outputs.

        x [tokens, inputs]; out [tokens, outputs] is changed in place and returned.
        """
        for number, tokens in self._step.groups:
            own = x.index_select(0, tokens) if number in self.pieces else x
            for down, up, first in self.pieces.get(number, ()):
                added = kernel.linear(kernel.linear(own, down), up)
                out[:, first : first + added.shape[1]].index_add_(0, tokens, added)
        return out


class StepAdapters:
    """The adapters of a model. `groups` says which tokens of the running step use which."""

    def __init__(self, linears: Iterable[tuple[str, Linear]]) -> None:
        """linears: the prefix of their weights' names, and the layer."""
        self.groups: tuple[AdapterTokens, ...] = ()
        self._places: dict[str, tuple[LayerAdapters, Linear, int]] = {}  # module -> its layer, and its first output
        for prefix, linear in linears:
            linear.adapters = adapters = LayerAdapters(self)
            first = 0
            for name, size in linear.parts.items():
                self._places[f"{prefix}{name}"] = adapters, linear, first
                first += size

    @property
    def modules(self) -> Collection[str]:
        """The modules that adapters may change, by the names of `ModelConfig.weights`."""
        return self._places.keys()

    def load(self, number: int, adapter: Adapter) -> None:
        """Lays an adapter out for the layers. number: one that was never used before."""
        for module, factors in adapter.items():
            layer, linear, first = self._places[module]
            down, up = (torch.tensor(factor, dtype=linear.dtype, device=linear.weight.device) for factor in factors)
            layer.pieces.setdefault(number, []).append(AdapterFactors(kernel.pack(down), kernel.pack(up), first))

    def unload(self, number: int) -> None:
        """Removes an adapter; an unknown number does no harm."""
        for layer, _, _ in self._places.values():
            layer.pieces.pop(number, None)

    def select(self, numbers: Sequence[int], device: torch.device) -> None:
        """Chooses the adapters of the next step. numbers: the adapter of each of its tokens; 0 = none."""
        tokens: dict[int, list[int]] = {}
        for token, number in enumerate(numbers):
            if number:
                tokens.setdefault(number, []).append(token)
        self.groups = tuple(AdapterTokens(number, torch.tensor(own, device=device)) for number, own in tokens.items())
