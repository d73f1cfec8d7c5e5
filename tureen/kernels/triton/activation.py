"""Gated activations: the first half of each row, activated, times the second (arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

BLOCK = 1024
FUNCTIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "relu2": 2}
"""The activations, by their names in a model's config."""


def activate_and_mul(x: Tensor, function: str) -> Tensor:
    """Returns function(gate) * up for x [rows, 2 * size], contiguous, whose halves are gate and up: [rows, size]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        _activate_and_mul[(rows, triton.cdiv(size, BLOCK))](x, out, size, **launch(function))
    return out


def reference(x: Tensor, function: str) -> Tensor:
    """Computes `activate_and_mul` in plain torch; the activated half is rounded to the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    if function == "silu":
        return functional.silu(gate).mul_(up)
    if function == "relu2":
        return functional.relu(gate).square_().mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def launch(function: str) -> dict[str, Any]:
    """Returns the constants and options with which the kernel is compiled, for all sizes."""
    return {"FUNCTION": FUNCTIONS[function], "BLOCK": BLOCK, "num_warps": 4}


@triton.jit
def _activate_and_mul(x, out, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    gate = tl.load(x + row * 2 * size + places, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + places, inside, 0.0).to(tl.float32)
    if FUNCTION == 0:
        active = gate / (1.0 + tl.exp(-gate))
    elif FUNCTION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))  # gate * (1 + tanh(inner)) / 2
    else:
        active = tl.maximum(gate, 0.0)
        active = active * active
    rounded = active.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + places, (rounded * up).to(out.dtype.element_ty), inside)
