"""Computes functions of rows so that a row's bits do not depend on the rows beside it.

A library picks its code by the number of rows, and may treat the last ones otherwise than the first. No library
promises that a row's sum has one order. So rows are computed in pieces of a few sizes, and only in sizes for which a
probe has shown, on this machine with this library and this number of threads, that a row gets the same bits at every
place in each of them. One row at a time is such a size wherever a computation can be repeated at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from tureen.log import get_logger

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SMALL = 16  # up to this many rows, a piece costs little more than one of half as many: reading weights takes the time

log = get_logger("kernels")


def agreeing_sizes(function: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the largest set of these sizes that gives each of `rows` the same bits, among any others and at any
    place.

    rows: a few that differ. Returns () when not even the same computation gives the same bits twice, and tells the
    operator.
    """
    groups: list[tuple[Tensor, list[int]]] = []
    for size in sizes:
        result = of_each(function, rows, size)
        if result is None:
            continue
        members = next((members for known, members in groups if torch.equal(known, result)), None)
        if members is None:
            groups.append((result, [size]))
        else:
            members.append(size)
    largest = max((members for _, members in groups), key=lambda members: (len(members), members[-1]), default=[])
    if not largest:
        say_that_nothing_is_promised()
    return tuple(largest)


def by_pieces(function: Callable[[Tensor], Tensor], x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Computes function(x), row by row of x [rows, ...], in pieces of these sizes; the last is filled up with zeros.

    sizes (): all rows at once.
    """
    rows = x.shape[0]
    if rows in sizes or not sizes or not rows:
        return function(x)
    pieces = _pieces(rows, sizes)
    padding = sum(pieces) - rows
    if padding:
        x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
    results = [function(piece) for piece in x.split(pieces)]  # type: ignore[no-untyped-call]
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result[:rows] if padding else result


@lru_cache(maxsize=1)
def say_that_nothing_is_promised() -> None:
    """Tells the operator, once, that results may depend on what they are batched with."""
    log.warning(
        "a request may give other tokens when it runs with other requests: torch has no method on this machine that "
        "gives the same bits; --kernels native, if available, guarantees them"
    )


def of_each(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor | None:
    """Computes each row in pieces of that size; returns None where the result depends on its place, or changes.

    Each row stands at each place, and is computed twice or more.
    """
    count = rows.shape[0]
    pieces = count if size > 1 else 2 * count
    index = (torch.arange(size) + torch.arange(pieces)[:, None]).flatten() % count
    computed = torch.cat([function(piece) for piece in rows[index].split(size)])  # type: ignore[no-untyped-call]
    first = torch.stack([(index == row).nonzero()[0, 0] for row in range(count)])
    result = computed[first]
    return result if torch.equal(computed, result[index]) else None


@lru_cache(maxsize=4096)
def _pieces(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns sizes, in ascending order, whose sum is no less than rows: few of them, and little to fill up."""
    pieces = []
    while rows > 0:
        above = next((size for size in sizes if size >= rows), sizes[-1])
        below = next((size for size in reversed(sizes) if size <= rows), above)
        is_near = above <= SMALL or rows - below > above // 4
        pieces.append(above if is_near else below)
        rows -= pieces[-1]
    return pieces
