"""Products with weights, whose order of sums depends on the weight's shape only.

The weight's tile is the M side of the tensor core's instruction and the tokens are its N side. So the number of tokens
chooses the width of the tile, never the order in which an output is summed along the inputs. If a weight has too few
tiles to occupy the device, its inputs are cut into a number of parts that its shape determines, and the partial sums
are added as a tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64
"""Outputs of a tile: the M side of one instruction of a warp group."""
INPUTS = 64
"""Inputs that are added before the next ones are loaded."""
TOKENS = (16, 32, 64, 128, 256)
"""Widths of tiles."""
PROGRAMS = 192
"""Programs that occupy a device: a weight with fewer tiles is cut along its inputs."""
MOST_PARTS = 8
ADDED = 256
"""Outputs of a program that adds partial sums."""


class Tile(NamedTuple):
    """The sizes of a launch."""

    tokens: int
    parts: int  # of the inputs
    steps: int  # of INPUTS each, in a part


def tile_of(outputs: int, inputs: int, rows: int) -> Tile:
    """Returns the tile for a weight [outputs, inputs] and this number of rows. Only `tokens` depends on the rows."""
    tokens = next((size for size in TOKENS if size >= rows), TOKENS[-1])
    tiles, steps = triton.cdiv(outputs, OUTPUTS), triton.cdiv(inputs, INPUTS)
    parts = 1
    while parts < MOST_PARTS and tiles * parts < PROGRAMS and steps >= 8 * parts:
        parts *= 2
    return Tile(tokens, parts, triton.cdiv(steps, parts))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x [rows, inputs] @ weight.T + bias, summed in float32. All are contiguous; weight [outputs, inputs]."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile_of(outputs, inputs, rows)
    sums = out if tile.parts == 1 else torch.empty(tile.parts, rows, outputs, dtype=torch.float32, device=x.device)
    unused_or_bias = weight if bias is None else bias
    grid = (triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, tile.tokens), tile.parts)
    constants = launch(tile, outputs, inputs, has_bias=bias is not None and tile.parts == 1)
    _multiply[grid](x, weight, unused_or_bias, sums, rows, **constants)
    if tile.parts > 1:
        _add_parts[(rows, triton.cdiv(outputs, ADDED))](
            sums, unused_or_bias, out, rows, **add_launch(tile, outputs, has_bias=bias is not None)
        )
    return out


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `linear` in plain torch, in float64."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def launch(tile: Tile, outputs: int, inputs: int, *, has_bias: bool) -> dict[str, Any]:
    """Returns the constants and options with which the product is compiled."""
    return {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "HAS_BIAS": has_bias,
        "STEPS": tile.steps,
        "BLOCK_M": OUTPUTS,
        "BLOCK_N": tile.tokens,
        "BLOCK_K": INPUTS,
        "num_warps": 4 if tile.tokens <= 128 else 8,
        "num_stages": 4 if tile.tokens <= 128 else 3,
    }


def add_launch(tile: Tile, outputs: int, *, has_bias: bool) -> dict[str, Any]:
    """Returns the constants and options with which the sum of the parts is compiled."""
    return {"OUTPUTS": outputs, "HAS_BIAS": has_bias, "PARTS": tile.parts, "BLOCK": ADDED, "num_warps": 2}


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    weight,
    bias,
    sums,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    is_output, is_row = m < OUTPUTS, n < rows
    weights = weight + m[:, None].to(tl.int64) * INPUTS
    tokens = x + n[None, :].to(tl.int64) * INPUTS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS):
        at = (part * STEPS + step) * BLOCK_K + k
        if INPUTS % (BLOCK_K * STEPS) == 0:
            w = tl.load(weights + at[None, :], is_output[:, None], 0.0)
            t = tl.load(tokens + at[:, None], is_row[None, :], 0.0)
        else:
            w = tl.load(weights + at[None, :], is_output[:, None] & (at < INPUTS)[None, :], 0.0)
            t = tl.load(tokens + at[:, None], is_row[None, :] & (at < INPUTS)[:, None], 0.0)
        total = tl.dot(w, t, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + m, is_output, 0.0).to(tl.float32)[:, None]
    place = (part.to(tl.int64) * rows + n[None, :]) * OUTPUTS + m[:, None]
    tl.store(sums + place, total.to(sums.dtype.element_ty), is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_parts(
    sums,
    bias,
    out,
    rows,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = m < OUTPUTS
    own = sums + row * OUTPUTS + m
    stride = rows.to(tl.int64) * OUTPUTS
    # The tree of 8 parts; of fewer, the parts that are missing are zeros.
    first = _pair(own, 0, stride, is_output, PARTS) + _pair(own, 2, stride, is_output, PARTS)
    second = _pair(own, 4, stride, is_output, PARTS) + _pair(own, 6, stride, is_output, PARTS)
    total = first + second
    if HAS_BIAS:
        total += tl.load(bias + m, is_output, 0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + m, total.to(out.dtype.element_ty), is_output)


@triton.jit
def _pair(own, part: tl.constexpr, stride, is_output, PARTS: tl.constexpr):
    first = tl.load(own + part * stride, is_output & (part < PARTS), 0.0)
    return first + tl.load(own + (part + 1) * stride, is_output & (part + 1 < PARTS), 0.0)
