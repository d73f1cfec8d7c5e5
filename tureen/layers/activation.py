"""Gated activations: of [tokens, 2 * size], the first half activated times the second."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
"""By the name in a model's config."""
