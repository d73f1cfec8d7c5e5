"""A layer's mlp made of experts, of which each token uses a few (arXiv:2101.03961, arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tureen.layers.activation import sigmoid
from tureen.layers.linear import Linear
from tureen.layers.mlp import GatedMLP


class ExpertsMLP:
    """The sum of what the chosen experts give, by the router's weights; with `shared`, plus its result times a gate."""

    def __init__(
        self,
        router: Linear,
        experts: list[GatedMLP],
        *,
        num_chosen: int,
        is_normalised: bool,
        shared: tuple[GatedMLP, Linear] | None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_chosen = num_chosen
        self._is_normalised = is_normalised
        self._shared = shared
        self.count = len(experts)
        self.counts: Tensor | None = None  # int64 [experts]: the tokens that each took; None = they are not counted

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = functional.softmax(self._router(x).float(), dim=-1).topk(self._num_chosen, dim=-1)
        if self.counts is not None:
            self.counts += torch.bincount(chosen.flatten(), minlength=self.count)
        if self._is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self._experts):
            rows, ranks = torch.where(chosen == index)
            if rows.numel():
                weighted = expert(x[rows]) * weights[rows, ranks, None].to(x.dtype)
                result.index_add_(0, rows, weighted)
        if self._shared is not None:
            mlp, gate = self._shared
            result += sigmoid(gate(x)) * mlp(x)
        return result

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._router.weights(prefix)
        for index, expert in enumerate(self._experts):
            yield from expert.weights(f"{prefix}experts.{index}.")
        if self._shared is not None:
            mlp, gate = self._shared
            yield from mlp.weights(f"{prefix}shared_expert.")
            yield from gate.weights(prefix)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        if self._shared is not None:
            yield from self._shared[0].linears(f"{prefix}shared_expert.")

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        for expert in self._experts:
            expert.finish()
        if self._shared is not None:
            self._shared[0].finish()
