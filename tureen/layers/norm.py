"""Normalisation of vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tureen.kernels.fused import FusedKernels


class RMSNorm:
    """Computes x / rms(x) * weight over the last dimension, in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, has_weight: bool = True) -> None:
        self._eps = eps
        self._weight = torch.empty(size, dtype=torch.float32) if has_weight else torch.ones(size)
        self._has_weight = has_weight
        self._kernels: FusedKernels | None = None

    @property
    def parameters(self) -> tuple[Tensor, float]:
        """The weight, float32 [size], and eps, the number added to the mean square."""
        return self._weight, self._eps

    def fuse(self, kernels: FusedKernels) -> None:
        """Computes rows of hidden states by fused kernels from now on."""
        self._kernels = kernels

    def after_adding(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Adds scale * added to x [tokens, size], in place, and returns its norm."""
        if self._kernels is not None:
            return self._kernels.add_norm(x, added.contiguous(), self._weight, self._eps, scale)
        return self(x.add_(added, alpha=scale))

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._kernels.add_norm(x.contiguous(), None, self._weight, self._eps, 1.0)
        wide = x.float()
        size = self._weight.shape[0]
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = squares.mul_(1 / size).add_(self._eps).rsqrt_()
        return wide.mul(inverse).mul_(self._weight).to(x.dtype)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        if self._has_weight:
            yield f"{name}.weight", self._weight


class LayerNorm:
    """Computes (x - mean(x)) / deviation(x) * weight + bias over the last dimension, in float32 (arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        self._eps = eps
        self._weight = torch.empty(size, dtype=torch.float32)
        self._bias = torch.empty(size, dtype=torch.float32) if bias else None

    def after_adding(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Adds scale * added to x [tokens, size], in place, and returns its norm."""
        return self(x.add_(added, alpha=scale))

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self._weight
        if self._bias is not None:
            yield f"{name}.bias", self._bias


Norm = RMSNorm | LayerNorm
