"""Gated activations: of [tokens, 2 * size], the first half activated times the second."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

GRAIN = 32768  # torch gives a CPU thread at least this many elements,
GELU_SHARED = 16384  # but shares gelu of more elements than this among all threads


def silu_and_mul(x: Tensor) -> Tensor:
    return _by_whole_rows(_silu_and_mul, x, _threads_for_most)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _by_whole_rows(_gelu_tanh_and_mul, x, _threads_for_gelu)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
"""By the name in a model's config."""


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _threads_for_most(elements: int, threads: int) -> int:
    return min(threads, -(-elements // GRAIN))


def _threads_for_gelu(elements: int, threads: int) -> int:
    return threads if elements > GELU_SHARED else 1


def _by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor, threads_for: Callable[[int, int], int]) -> Tensor:
    """Apply it so that no row is shared between CPU threads.

    The elements left over where a thread's share ends are computed with another exp than the rest, so that a row's last
    bits would depend on how many rows there are.
    """
    rows, size = x.shape[0], x.shape[1] // 2
    if rows * size <= GELU_SHARED or x.device.type != "cpu":
        return function(x)
    parts = _parts(rows, size, torch.get_num_threads(), threads_for)
    return function(x) if len(parts) == 1 else torch.cat([function(part) for part in x.split(parts)])  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def _parts(rows: int, size: int, threads: int, threads_for: Callable[[int, int], int]) -> list[int]:
    """Numbers of rows that torch shares out evenly among the threads it would use for them."""
    parts = []
    while rows:
        part = rows
        while part > 1 and part % threads_for(part * size, threads):
            part -= 1
        parts.append(part)
        rows -= part
    return parts
