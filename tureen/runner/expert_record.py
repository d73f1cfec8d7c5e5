"""Records how many tokens each expert of a mixture model takes. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from tureen.errors import Conflict, InvalidRequest
from tureen.models.config import ModelConfig
from tureen.runner.forward import Forward


class ExpertRecord:
    """The counts of tokens by layer and expert, and whether they are being taken."""

    def __init__(self, model: ModelConfig) -> None:
        self.is_on = False
        self._layers = [layer for layer in range(model.num_layers) if model.experts_of(layer) is not None]
        self._counts: list[list[int]] = []  # of each of these layers, as far as they are not with the forward pass

    def start(self, forward: Forward) -> None:
        """Counts from now on, from zero. Raises InvalidRequest for a model without experts."""
        self._check(forward)
        forward.count_experts(is_on=True)
        forward.take_expert_counts()
        self._counts = []
        self.is_on = True

    def stop(self, forward: Forward) -> None:
        """Counts no longer; what was counted stays until it is taken. Raises InvalidRequest, Conflict."""
        self._check(forward)
        if not self.is_on:
            raise Conflict(
                "no experts are being counted; start with /start_expert_distribution_record", code="no_expert_record"
            )
        self._counts = _sum(self._counts, forward.take_expert_counts())
        forward.count_experts(is_on=False)
        self.is_on = False

    def take(self, forward: Forward) -> list[tuple[int, list[int]]]:
        """Returns each layer that has experts with their counts, and begins from zero. Raises InvalidRequest."""
        self._check(forward)
        counts = _sum(self._counts, forward.take_expert_counts() if self.is_on else [])
        self._counts = []
        return list(zip(self._layers, counts, strict=False))

    def _check(self, forward: Forward) -> None:
        """Raises InvalidRequest where there is nothing to count, or no way to."""
        if not self._layers:
            forward.count_experts(is_on=False)  # a model without experts raises here
            raise InvalidRequest("the model has no experts, so there is nothing to count", code="no_experts")


def _sum(counts: list[list[int]], more: Iterable[list[int]]) -> list[list[int]]:
    """Adds counts of each layer; none of either means zeros."""
    pairs = zip(counts, more, strict=True) if counts and more else ()
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs] or counts or list(more)
