"""RMSNorm, with the residual added first (arXiv:1910.07467): one program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384
"""Numbers of the longest row: all of them are in registers."""


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Returns the norm of x, after adding scale * added to x in place.

    x, added [rows, size], contiguous; weight float32 [size]. added None: x does not change.
    """
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        summand = x if added is None else added
        _add_norm[(rows,)](x, summand, weight, out, eps, scale, **launch(size, has_added=added is not None))
    return out


def reference(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Computes `add_norm` in plain torch, in float32 with the sum rounded to the dtype of x."""
    if added is not None:
        x.add_(added, alpha=scale)
    wide = x.float()
    inverse = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul(inverse).mul_(weight).to(x.dtype)


def launch(size: int, *, has_added: bool) -> dict[str, Any]:
    """Returns the constants and options with which the kernel is compiled for rows of this size."""
    block = triton.next_power_of_2(size)
    return {"HAS_ADDED": has_added, "SIZE": size, "BLOCK": block, "num_warps": min(16, max(1, block // 1024))}


@triton.jit
def _add_norm(
    x,
    added,
    weight,
    out,
    eps,
    scale,
    HAS_ADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    values = tl.load(x + row * SIZE + places, inside, 0.0)
    if HAS_ADDED:
        more = tl.load(added + row * SIZE + places, inside, 0.0).to(tl.float32)
        values = (values.to(tl.float32) + more * scale).to(x.dtype.element_ty)
        tl.store(x + row * SIZE + places, values, inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    factors = tl.load(weight + places, inside, 0.0)
    tl.store(out + row * SIZE + places, (wide * inverse * factors).to(out.dtype.element_ty), inside)
