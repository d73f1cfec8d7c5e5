"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class RMSNorm:
    """Computes x / rms(x) * weight over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self._eps = eps
        self._weight = torch.empty(size, dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        size = self._weight.shape[0]
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = squares.mul_(1 / size).add_(self._eps).rsqrt_()
        return wide.mul(inverse).mul_(self._weight).to(x.dtype)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self._weight
