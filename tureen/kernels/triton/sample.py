"""Draws tokens by inverse CDF, by the rule of `sampling/probability.py` and with the numbers of `sampling/random.py`.

Weights are float64, relative to the best token's. They are summed in blocks of 256 as a tree, and running sums are
those of Hillis and Steele, so each addition is one that the CPU makes. The exponential is the device's: a weight may
differ from the CPU's in its last bit, and then a draw differs if its number falls between the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
_BLOCK = tl.constexpr(BLOCK)
BLOCKS = 8
"""Blocks that a program sums."""


class Draws(NamedTuple):
    """Tokens int64 [rows], and their log-probabilities in nats, float64 [rows]."""

    token_ids: Tensor
    logprobs: Tensor


def draw(logits: Tensor, peaks: Tensor, temperatures: Tensor, uniforms: Tensor) -> Draws:
    """Draws a token of each row of logits, float32 [rows, vocabulary], contiguous.

    peaks: float32 [rows], the largest logits, which are finite. temperatures: float64 [rows], above 0. uniforms:
    float64 [rows], in [0, 1).
    """
    rows, size = logits.shape
    num_blocks = triton.cdiv(size, BLOCK)
    sums = torch.empty(rows, num_blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        constants = launch(size)
        _sum_blocks[(rows, triton.cdiv(num_blocks, BLOCKS))](logits, peaks, temperatures, sums, **constants)
        constants = choose_launch(size)
        _choose[(rows,)](logits, peaks, temperatures, sums, uniforms, tokens, logprobs, **constants)
    return Draws(tokens, logprobs)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns one number in [0, 1) with 53 random bits for each seed and position, int64 [rows]; float64 [rows]."""
    numbers = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _uniforms[(triton.cdiv(len(seeds), BLOCK),)](seeds, positions, numbers, len(seeds), num_warps=2)
    return numbers


def launch(size: int) -> dict[str, Any]:
    """Returns the constants and options with which the sums of blocks are compiled for a vocabulary."""
    return {"SIZE": size, "NUM_BLOCKS": triton.cdiv(size, BLOCK), "BLOCKS": BLOCKS, "num_warps": 4}


def choose_launch(size: int) -> dict[str, Any]:
    """Returns the constants and options with which the draw is compiled for a vocabulary."""
    num_blocks = triton.cdiv(size, BLOCK)
    options = {"num_warps": 4, "enable_fp_fusion": False}  # additions alone, as on the CPU
    return {"SIZE": size, "NUM_BLOCKS": num_blocks, "GROUPS": triton.cdiv(num_blocks, BLOCK), **options}


@triton.jit
def _sum_blocks(logits, peaks, temperatures, sums, SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    places = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    total = _weights(logits + row * SIZE, places, tl.load(peaks + row), tl.load(temperatures + row), SIZE)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 128)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 64)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 32)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 16)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 8)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 4)), 1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, 2)), 1)
    tl.store(sums + row * NUM_BLOCKS + blocks, tl.sum(total, 1), blocks < NUM_BLOCKS)


@triton.jit
def _choose(
    logits,
    peaks,
    temperatures,
    sums,
    uniforms,
    tokens,
    logprobs,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = sums + row * NUM_BLOCKS
    columns = tl.arange(0, _BLOCK)
    before = tl.zeros((_BLOCK,), tl.float64)
    for group in range(GROUPS - 1):
        ends = _running(_load_sums(own, group, NUM_BLOCKS))
        before += tl.where(columns == group + 1, _at(ends, _BLOCK - 1), 0.0)
    before = _running(before)
    ends = _running(_load_sums(own, GROUPS - 1, NUM_BLOCKS)) + _at(before, GROUPS - 1)
    total = _at(ends, NUM_BLOCKS - 1 - (GROUPS - 1) * 256)
    target = tl.load(uniforms + row) * total
    first, last = NUM_BLOCKS, -1
    for group in range(GROUPS):
        weights = _load_sums(own, group, NUM_BLOCKS)
        ends = _running(weights) + _at(before, group)
        above, possible = _bounds(ends, weights, target, group)
        first, last = (
            tl.minimum(first, tl.where(above < _BLOCK, group * _BLOCK + above, NUM_BLOCKS)),
            tl.maximum(last, possible),
        )
    block = tl.where(first < NUM_BLOCKS, first, last)
    ahead = tl.maximum(block - 1, 0)
    ends = _running(_load_sums(own, ahead // _BLOCK, NUM_BLOCKS)) + _at(before, ahead // _BLOCK)
    target -= tl.where(block > 0, _at(ends, ahead % _BLOCK), 0.0)
    peak, temperature = tl.load(peaks + row), tl.load(temperatures + row)
    weights = _weights(logits + row * SIZE, block * _BLOCK + columns, peak, temperature, SIZE)
    above, possible = _bounds(_running(weights), weights, target, block)
    token = tl.where(above < _BLOCK, block * _BLOCK + above, possible)
    logit = tl.load(logits + row * SIZE + token).to(tl.float64)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (logit - peak.to(tl.float64)) / temperature - tl.log(total))


@triton.jit
def _weights(logits, places, peak, temperature, SIZE: tl.constexpr):
    """Returns the weights of tokens, float64; 0 beyond the vocabulary."""
    values = tl.load(logits + places, places < SIZE, float("-inf")).to(tl.float64)
    return tl.exp((values - peak.to(tl.float64)) / temperature)


@triton.jit
def _load_sums(own, group, NUM_BLOCKS: tl.constexpr):
    places = group * _BLOCK + tl.arange(0, _BLOCK)
    return tl.load(own + places, places < NUM_BLOCKS, 0.0)


@triton.jit
def _running(values):
    """Returns the inclusive running sums of 256 values, by doubling distances."""
    columns = tl.arange(0, _BLOCK)
    for power in tl.static_range(0, 8):
        before = tl.gather(values, tl.maximum(columns - (1 << power), 0), 0)
        values = tl.where(columns >= (1 << power), before + values, values)
    return values


@triton.jit
def _at(values, place):
    """Returns the value at a place; adding zeros is exact."""
    return tl.sum(tl.where(tl.arange(0, _BLOCK) == place, values, 0.0), 0)


@triton.jit
def _bounds(ends, weights, target, group):
    """Returns the first of 256 columns with a weight whose running sum is above the target, or 256; and the last place
    of the group with a weight, or -1."""
    columns = tl.arange(0, _BLOCK)
    first = tl.min(tl.where((weights > 0) & (ends > target), columns, _BLOCK), 0)
    return first, tl.max(tl.where(weights > 0, group * _BLOCK + columns, -1), 0)


@triton.jit(do_not_specialize=["rows"])
def _uniforms(seeds, positions, numbers, rows):
    """Philox4x32-10, with a seed as key and a position as counter."""
    own = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = own < rows
    seed, position = tl.load(seeds + own, inside, 0), tl.load(positions + own, inside, 0)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low, high, zero, zero)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    tl.store(numbers + own, bits.to(tl.float64) * 1.1102230246251565e-16, inside)


def reference(logits: Tensor, peaks: Tensor, temperatures: Tensor, uniforms: Tensor) -> Draws:
    """Computes `draw` in plain torch, with running sums one after another."""
    weights = ((logits.double() - peaks.double()[:, None]) / temperatures[:, None]).exp()
    ends = weights.cumsum(dim=1)
    reached = (ends > (uniforms * ends[:, -1])[:, None]) & (weights > 0)
    tokens = reached.byte().argmax(dim=1)
    own = logits.gather(1, tokens[:, None])[:, 0].double()
    return Draws(tokens, (own - peaks.double()) / temperatures - ends[:, -1].log())
