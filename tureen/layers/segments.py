"""Layers of which each rank computes some segments, and the one tree in which their results are added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tureen.devices.groups import RankGroup
from tureen.kernels import linear as kernel
from tureen.layers.embedding import Embedding, scaled_logits
from tureen.layers.linear import Linear


class SegmentLayer(Protocol):
    """A layer, or a segment of one, whose result is a part of the layer's sum."""

    def __call__(self, x: Tensor, *shared: Any) -> Tensor: ...

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]: ...

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]: ...

    def finish(self) -> None: ...


class Segments:
    """A layer of a block: the sum of its segments over all ranks, plus a bias.

    layers: the segments of this rank by index. num_own: how many there could be. out: the name of the matrix that the
    bias belongs to, where it has one.
    """

    def __init__(
        self, layers: Mapping[int, SegmentLayer], num_own: int, group: RankGroup, *, out: str, bias: Tensor | None
    ) -> None:
        self._layers = dict(layers)
        first = group.rank * num_own
        self._own = [self._layers.get(index) for index in range(first, first + num_own)]
        self._group = group
        self._out = out
        self._bias = bias

    def __call__(self, x: Tensor, *shared: Any) -> Tensor:
        own = tree_sum([None if layer is None else layer(x, *shared).float() for layer in self._own])
        assert own is not None  # no rank is without a share: `why_not`
        total = tree_sum(self._group.gather_all(own))
        assert total is not None
        return (total if self._bias is None else total + self._bias).to(x.dtype)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the weight that no segment has, by its name in checkpoints: the bias."""
        if self._bias is not None:
            yield f"{prefix}{self._out}.bias", self._bias

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields nothing: adapters are cut into segments too."""
        return iter(())

    def segment(self, index: int) -> SegmentLayer | None:
        """Returns the segment with that index; None where it is empty."""
        return self._layers.get(index)

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        for layer in self._layers.values():
            layer.finish()


class SegmentHead:
    """A head of which each rank computes the logits of some tokens; see Head. Rank 0 gets all of them.

    sizes: the numbers of tokens of all segments. `tied`: the embedding whose weights it shares.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: Sequence[int],
        group: RankGroup,
        *,
        dtype: torch.dtype,
        tied: Embedding | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        each = len(sizes) // group.size
        self._widths = [sum(sizes[first : first + each]) for first in range(0, len(sizes), each)]
        self._first = sum(self._widths[: group.rank])
        self._sizes = list(sizes[group.rank * each : (group.rank + 1) * each])
        self._group = group
        self._tied = tied
        self._scale = scale
        self._softcap = softcap
        self._weight = torch.empty(0 if tied else self._widths[group.rank], hidden_size, dtype=dtype)
        self._parts: list[Tensor] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns float32 [rows, vocab]; on other ranks than 0 nothing, [0, vocab]."""
        own = [kernel.linear(hidden, part).float() for part in self._parts]
        missing = max(self._widths) - sum(self._sizes)  # all send the same number
        own += [own[0].new_zeros(hidden.shape[0], missing)] if missing else []
        gathered = self._group.gather(torch.cat(own, 1))
        if not gathered:
            return hidden.new_empty(0, sum(self._widths), dtype=torch.float32)
        pieces = [piece[:, :width] for piece, width in zip(gathered, self._widths, strict=True)]
        return scaled_logits(torch.cat(pieces, 1), self._scale, self._softcap)

    def place(self) -> tuple[Tensor, slice] | None:
        """Returns the tensor that this rank's rows of the head's weight go into, and which rows these are; None where
        the weights are the embedding's."""
        own = slice(self._first, self._first + sum(self._sizes))
        return None if self._tied is not None else (self._weight, own)

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        own = self._weight
        if self._tied is not None:
            own = self._tied.weight[self._first : self._first + sum(self._sizes)]
        self._parts = [kernel.pack(part) for part in own.split(self._sizes)]  # type: ignore[no-untyped-call]
        self._weight = own[:0]


def tree_sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Adds tensors as one binary tree: each half, then both halves. What is None is left out; their number is a power
    of 2."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    first, second = tree_sum(parts[:middle]), tree_sum(parts[middle:])
    if first is None or second is None:
        return second if first is None else first
    return first + second
