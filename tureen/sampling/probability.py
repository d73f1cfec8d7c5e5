"""Arithmetic on whole rows of logits: softmax weights, ranking, inverse-CDF draws.

A row's numbers are bit-identical whatever other rows stand beside it, and on every device. Library reductions
and scans choose their order of addition by the shape of the batch, so sums here are fixed trees of elementwise
additions instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # tokens summed together; a power of two


class Weights(NamedTuple):
    """Unnormalised softmax of r rows: the most probable token weighs exactly 1. All float64."""

    blocks: Tensor  # [r, num_blocks, BLOCK], in token-id order, zero beyond the vocabulary
    block_sums: Tensor  # [r, num_blocks]
    block_ends: Tensor  # [r, num_blocks]: running sums of block_sums

    @property
    def totals(self) -> Tensor:
        """Returns the sum of each row's weights, [r]: probability = weight / total."""
        return self.block_ends[:, -1]

    def at(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Returns the weights [k, w] at rows [k] and token_ids [k, w]."""
        return self.blocks.flatten(1)[rows[:, None], token_ids]


def softmax_weights(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Weights:
    """Computes exp((logit - peak) / temperature) of logits [r, vocab]; peaks are the rows' maxima.

    peaks [r], temperatures [r] float64.
    """
    weights = logits.double().sub_(peaks.double()[:, None]).div_(temperatures[:, None]).exp_()
    return in_blocks(weights)


def in_blocks(weights: Tensor) -> Weights:
    """Prepares weights [r, vocab] float64, in token-id order, for `draw`: adds the sums of their blocks."""
    blocks = _blocks(weights)
    block_sums = _tree_sums(blocks)
    return Weights(blocks, block_sums, running_sums(block_sums))


def running_sums(values: Tensor) -> Tensor:
    """Returns inclusive prefix sums of values [r, w]. Place i is the same tree of additions whatever the width."""
    if values.shape[1] <= BLOCK:
        return _doubling_sums(values)
    inside = _doubling_sums(_blocks(values))
    before = torch.nn.functional.pad(running_sums(inside[:, :-1, -1]), (1, 0))
    return (inside + before[:, :, None]).flatten(1)[:, : values.shape[1]]


def peak_tokens(logits: Tensor, peaks: Tensor) -> Tensor:
    """Returns the lowest token id among the largest logits of each row, [r]; peaks [r] are the rows' maxima."""
    if logits.shape[1] % BLOCK:
        return logits.argmax(dim=1)
    blocks = logits.reshape(len(logits), -1, BLOCK)  # much faster than argmax over the whole vocabulary
    block = _first(blocks.amax(dim=2) == peaks[:, None])
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _first(inside == peaks[:, None]))[:, 0]


def rank_keys(logits: Tensor) -> Tensor:
    """Returns distinct int64 keys in the shape of logits [r, vocab]: larger = higher logit, or lower id among
    equals."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: there is one zero
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # ordered as the floats are
    places = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return bits.long().bitwise_left_shift_(32).add_(places)


def best_keys(keys: Tensor, width: int) -> Tensor:
    """Returns the `width` largest keys of each row, largest first."""
    width = min(width, keys.shape[1])
    if keys.device.type != "cpu":
        return keys.topk(width, dim=1).values
    host = keys.numpy()  # numpy sorts many times faster than torch on a CPU
    if width < host.shape[1]:
        host = np.partition(host, -width, axis=1)[:, -width:]
    return torch.from_numpy(np.sort(host, axis=1)[:, ::-1].copy())


def key_tokens(keys: Tensor, vocab_size: int) -> Tensor:
    """Returns the token ids that keys of `rank_keys` belong to."""
    return vocab_size - 1 - (keys & 0xFFFFFFFF)


def draw(weights: Weights, uniforms: Tensor) -> Tensor:
    """Draws token ids [r]: in token-id order, the first whose running weight exceeds uniform * total. uniforms: [r]
    float64."""
    targets = uniforms * weights.totals
    block = _first_above(weights.block_ends, targets, weights.block_sums)
    before = torch.nn.functional.pad(weights.block_ends, (1, 0)).gather(1, block)[:, 0]
    inside = weights.blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _first_above(running_sums(inside), targets - before, inside))[:, 0]


def spans(weights: Weights, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the weights before each of token_ids [r, k], as `draw` has it, and the token's weight."""
    block, place = token_ids // BLOCK, (token_ids % BLOCK)[:, :, None]
    before = torch.nn.functional.pad(weights.block_ends, (1, 0)).gather(1, block)
    inside = weights.blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))
    ends = running_sums(inside.flatten(0, 1)).view_as(inside)
    starts = torch.nn.functional.pad(ends, (1, 0)).gather(2, place)[:, :, 0]
    return before + starts, inside.gather(2, place)[:, :, 0]


def _first_above(ends: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the index [r, 1] of the first place with weight > 0 and running sum above target, else of the last with
    weight > 0.

    Rounding may leave the last running sum at the target, or one running sum a hair below its predecessor.
    """
    possible = weights > 0
    reached = (ends > targets[:, None]) & possible
    last = possible.shape[1] - 1 - _first(possible.flip(1))
    return torch.where(reached.any(dim=1, keepdim=True), _first(reached), last)


def _first(places: Tensor) -> Tensor:
    """Returns the index [r, 1] of the first True in each row; 0 where there is none."""
    return places.byte().argmax(dim=1, keepdim=True)


def _blocks(values: Tensor) -> Tensor:
    """Returns values [r, w] as [r, num_blocks, BLOCK], zero beyond w."""
    missing = -values.shape[1] % BLOCK
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.reshape(len(values), -1, BLOCK)


def _doubling_sums(values: Tensor) -> Tensor:
    """Returns inclusive prefix sums along the last dimension (Hillis, Steele: "Data parallel algorithms", 1986)."""
    shift = 1
    while shift < values.shape[-1]:
        values = torch.cat((values[..., :shift], values[..., shift:] + values[..., :-shift]), dim=-1)
        shift *= 2
    return values


def _tree_sums(blocks: Tensor) -> Tensor:
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        blocks = blocks[..., :half] + blocks[..., half:]
    return blocks[..., 0]
