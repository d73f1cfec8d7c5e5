"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / rms(x) * weight over the last dimension. `unit_offset`: stored as weight - 1 and computed in float32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, unit_offset: bool = False) -> None:
        self._eps = eps
        self._unit_offset = unit_offset
        self._weight = torch.empty(size, dtype=torch.float32 if unit_offset else dtype)

    def __call__(self, x: Tensor) -> Tensor:
        shape = self._weight.shape
        if self._unit_offset:
            return functional.rms_norm(x.float(), shape, self._weight, self._eps).to(x.dtype)
        return functional.rms_norm(x, shape, self._weight, self._eps)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self._weight

    def finish(self) -> None:
        """All weights are there."""
        if self._unit_offset:
            self._weight += 1
