"""Numbers of queries and of keys for which torch gives a query the same bits, whatever else is computed with it.

On a CPU torch's kernel walks the keys in blocks of KEY_BLOCK, and the queries in tiles whose size depends on their
number; what multiplies a tile by a block depends on the sizes of both, and on the machine. So only sizes are used of
which a probe has shown that they agree: as a query moves among others, as keys that it does not see come and go, and
as other rows are computed beside it. In the probe pairs of keys are equal and their values opposite: nothing is left of
the sum but its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tureen.kernels.rows import SIZES, agreeing_sizes, of_each, say_that_nothing_is_promised

KEY_BLOCK = 512
KEYS = (64, 128, 256)  # tried; beyond, multiples of KEY_BLOCK
GPU_KEYS = 16
PAIRED = 8  # keys of the probe among which one cancels another


class Tiles(NamedTuple):
    """The numbers of queries and of keys for which torch gives a query the same bits, ascending."""

    queries: tuple[int, ...]  # of one row and one head of keys; empty = any
    keys: tuple[int, ...]
    block: int  # beyond those, its multiples

    def most_queries(self, heads: int) -> int:
        """Returns the number of queries that fit into a tile, where `heads` heads share the keys."""
        return max(1, self.queries[-1] // heads) if self.queries else 1 << 30

    def padded_queries(self, number: int) -> int:
        """Returns the padded number of queries. Tells the operator where more are needed than any size that agrees
        has."""
        if self.queries and number > self.queries[-1]:
            say_that_nothing_is_promised()
        return next((size for size in self.queries if size >= number), number)

    def padded_keys(self, number: int) -> int:
        """Returns the padded number of keys: the least size that agrees and holds them, else a multiple of the
        block."""
        return next((size for size in self.keys if size >= number), -(-number // self.block) * self.block)


def tiles(
    kv_heads: int, head_dim: int, softcap: float | None, has_sinks: bool, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Returns the sizes for this shape, dtype and device; probed once on a CPU."""
    if device.type != "cpu":
        return Tiles((), (), GPU_KEYS)
    return _probed(kv_heads, head_dim, softcap, has_sinks, dtype, torch.get_num_threads())


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Computes scaled dot-product attention, [rows, kv heads, queries, head_dim].

    q [rows, kv heads, queries, head_dim]; k, v [rows, kv heads, keys, head_dim]; mask [rows, 1, queries, keys], added
    to the scores; sinks [kv heads, queries]: one more score each, which no value belongs to.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(2, 3) * (scale if softcap is None else scale / softcap)
    scores = (scores if softcap is None else torch.tanh(scores) * softcap) + mask
    if sinks is None:
        return scores.float().softmax(dim=-1).to(v.dtype) @ v
    own = sinks.float()[None, :, :, None].expand(scores.shape[0], -1, -1, 1)
    return torch.cat((scores.float(), own), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype) @ v


@lru_cache(maxsize=256)
def _probed(
    kv_heads: int, head_dim: int, softcap: float | None, has_sinks: bool, dtype: torch.dtype, threads: int
) -> Tiles:
    """Probes the sizes on a CPU. `threads`: the number that torch uses now."""
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(head_dim)
        queries = torch.randn(3, kv_heads * head_dim, generator=generator).to(dtype)
        shape = 1, kv_heads, KEY_BLOCK // PAIRED, PAIRED // 2, head_dim
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        order = torch.randperm(PAIRED, generator=generator)
        k, v = (torch.cat(two, 3)[:, :, :, order].flatten(2, 3) for two in ((k, k), (v, -v)))
        attend = partial(_attend, k=k, v=v, softcap=softcap, has_sinks=has_sinks)
        sizes = agreeing_sizes(partial(attend, seen=KEY_BLOCK, width=KEY_BLOCK), queries, SIZES)

        def agrees(seen: int, width: int, rows: int = 1) -> bool:
            first, other = (
                partial(attend, seen=seen, width=of, rows=of_rows) for of, of_rows in ((KEY_BLOCK, 1), (width, rows))
            )
            return _agree(first, other, queries, sizes)

        keys = [width for width in KEYS if all(agrees(seen, width) for seen in (PAIRED, width // 2 + PAIRED, width))]
        if not (
            agrees(3 * PAIRED, 2 * KEY_BLOCK)
            and agrees(KEY_BLOCK, KEY_BLOCK, 3)
            and agrees(KEY_BLOCK, 3 * KEY_BLOCK, 2)
        ):
            say_that_nothing_is_promised()
    return Tiles(sizes, tuple(keys), KEY_BLOCK)


def _agree(
    first: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], queries: Tensor, sizes: tuple[int, ...]
) -> bool:
    """Says whether both functions give the same bits for the fewest and for the most queries."""
    results = [of_each(function, queries, size) for function in (first, other) for size in {*sizes[:1], *sizes[-1:]}]
    return all(result is not None and results[0] is not None and torch.equal(result, results[0]) for result in results)


def _attend(
    queries: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    softcap: float | None,
    has_sinks: bool,
    seen: int,
    width: int,
    rows: int = 1,
) -> Tensor:
    """Attends with queries [number, kv_heads * head_dim], of which each sees the first `seen` of `width` keys; same
    shape."""
    kv_heads, head_dim = k.shape[1], k.shape[3]
    q = queries.view(1, -1, kv_heads, head_dim).transpose(1, 2).expand(rows, -1, -1, -1)
    k, v = (torch.cat((tensor[:, :, :seen], tensor[:, :, :1].expand(-1, -1, width - seen, -1)), 2) for tensor in (k, v))
    k, v = (tensor.expand(rows, -1, -1, -1) for tensor in (k, v))
    mask = torch.zeros(rows, 1, len(queries), width, dtype=queries.dtype)
    mask[..., seen:] = float("-inf")
    sinks = torch.zeros(kv_heads, len(queries)) if has_sinks else None
    out = scaled_dot_product(q, k, v, mask, head_dim**-0.5, softcap, sinks)
    return out[-1].transpose(0, 1).reshape(len(queries), -1)
