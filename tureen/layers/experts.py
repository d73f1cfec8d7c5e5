"""A layer's mlp made of experts, of which each token uses a few (arXiv:2101.03961, arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tureen.layers.activation import sigmoid
from tureen.layers.linear import Linear
from tureen.layers.mlp import MLP
from tureen.layers.norm import Norm
from tureen.layers.routing import Experts


class ExpertRouter:
    """Chooses a token's experts and weighs them; see layers.routing.Experts."""

    def __init__(self, hidden_size: int, experts: Experts, dtype: torch.dtype) -> None:
        self._experts = experts
        self._linear = Linear(hidden_size, {"gate": experts.count}, bias=experts.has_bias, dtype=dtype)
        self._correction = torch.empty(experts.count, dtype=torch.float32) if experts.has_correction else None
        self._scale = torch.empty(hidden_size, dtype=torch.float32) if experts.are_beside else None
        self._expert_scale = torch.empty(experts.count, dtype=torch.float32) if experts.are_beside else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the numbers of each token's experts, both [tokens, num_chosen]."""
        config = self._experts
        logits = self._linear(x).float()
        if config.score == "sparsemixer":
            return _mixed_sparsely(logits, config.num_chosen, config.jitter)
        scores = functional.softmax(logits, dim=-1) if config.score == "softmax" else sigmoid(logits)
        ranked = scores if self._correction is None else scores + self._correction
        if config.num_groups > 1:
            ranked = _without_groups(ranked, config)
        chosen = ranked.topk(config.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * config.factor
        if self._expert_scale is not None:
            weights = weights * self._expert_scale[chosen]
        return weights, chosen

    def scaled(self, x: Tensor) -> Tensor:
        """Returns the input of the router of experts beside an mlp, from normalised x."""
        assert self._scale is not None
        size: float = len(self._scale) ** -0.5
        return (x * self._scale * size).to(x.dtype)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._linear.weights(prefix)
        if self._correction is not None:
            yield f"{prefix}gate.e_score_correction_bias", self._correction
        if self._scale is not None and self._expert_scale is not None:
            yield f"{prefix}gate.scale", self._scale
            yield f"{prefix}gate.per_expert_scale", self._expert_scale


def _mixed_sparsely(logits: Tensor, num_chosen: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Chooses the best experts in turn; a weight is a softmax over the logits left that are near enough to it."""
    left, weights, chosen = logits, [], []
    for _ in range(num_chosen):
        largest, best = left.max(dim=-1, keepdim=True)
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * jitter
        near = functional.softmax(left.masked_fill(is_far, -torch.inf), dim=-1)
        weights.append(near.gather(1, best))
        chosen.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(chosen, dim=1)


def _without_groups(ranked: Tensor, experts: Experts) -> Tensor:
    """Excludes the experts of all but the best groups, ranked by the sum of their best."""
    grouped = ranked.view(ranked.shape[0], experts.num_groups, -1)
    sums = grouped.topk(min(experts.group_top_k, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    best = sums.topk(experts.num_chosen_groups, dim=-1).indices
    excluded = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, value=False)
    return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)


class ExpertsMLP:
    """The sum of what the chosen experts give, by the router's weights.

    shared: one more that every token uses, times the sigmoid of `shared_gate` if there is one.
    """

    def __init__(
        self, router: ExpertRouter, experts: list[MLP], shared: MLP | None, shared_gate: Linear | None
    ) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._shared_gate = shared_gate
        self.count = len(experts)
        self.counts: Tensor | None = None  # int64 [experts]: the tokens that each took; None = they are not counted

    def __call__(self, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        """Computes the experts for x. router_x: the router's input; None: x."""
        weights, chosen = self._router(x if router_x is None else router_x)
        if self.counts is not None:
            self.counts += torch.bincount(chosen.flatten(), minlength=self.count)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self._experts):
            rows, ranks = torch.where(chosen == index)
            if rows.numel():
                weighted = expert(x[rows]) * weights[rows, ranks, None].to(x.dtype)
                result.index_add_(0, rows, weighted)
        if self._shared is not None:
            gate = 1.0 if self._shared_gate is None else sigmoid(self._shared_gate(x))
            result += gate * self._shared(x)
        return result

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._router.weights(prefix)
        for index, expert in enumerate(self._experts):
            yield from expert.weights(f"{prefix}experts.{index}.")
        if self._shared is not None:
            yield from self._shared.weights(f"{prefix}shared_expert.")
        if self._shared_gate is not None:
            yield from self._shared_gate.weights(prefix)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        if self._shared is not None:
            yield from self._shared.linears(f"{prefix}shared_expert.")

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        for expert in self._experts:
            expert.finish()
        if self._shared is not None:
            self._shared.finish()


class ExpertsBeside:
    """An mlp and experts beside it, which read x through norms of their own (Gemma 4).

    norms: after the mlp, before the experts, after them, by their names.
    """

    def __init__(
        self, mlp: MLP, experts: ExpertsMLP, router: ExpertRouter, norms: dict[str, Norm], plain: Norm
    ) -> None:
        """plain: a norm without weights."""
        self._mlp = mlp
        self.experts = experts
        self._router = router
        self.norms = norms
        self._plain = plain

    def __call__(self, normed: Tensor, x: Tensor) -> Tensor:
        """Returns the sum of both results. normed: x after the norm of the mlp."""
        after_mlp, before_experts, after_experts = self.norms.values()
        router_x = self._router.scaled(self._plain(x))
        return after_mlp(self._mlp(normed)) + after_experts(self.experts(before_experts(x), router_x))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._mlp.weights(prefix)
        yield from self.experts.weights(prefix)

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield from self._mlp.linears(prefix)

    def finish(self) -> None:
        self._mlp.finish()
        self.experts.finish()
