"""Paged attention that reads keys and values where they are (PagedAttention, arXiv:2309.06180; arXiv:2205.14135).

The keys of every query are cut into sections at multiples of SECTION. Each section is summed by itself, and the results
are merged in order. In a decode step a program computes one section. In a prefill a program computes all sections of a
tile of queries, one after another. Blocks that a query does not see add exact zeros. So the order of a query's sums
depends on its position only: neither on the batch nor on how its prompt was cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SECTION = 512
"""Keys that are summed together."""
QUERIES = 64
"""Rows of a tile: queries times the heads that share keys. Decode steps fill theirs up, so that the same instructions
of the tensor cores compute a query in both."""
LARGEST_HEAD = 256
_SECTION, _QUERIES, _LOG2E = tl.constexpr(SECTION), tl.constexpr(QUERIES), tl.constexpr(1.4426950408889634)


class Shape(NamedTuple):
    """The attention of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None

    @property
    def group(self) -> int:
        """The heads that share keys."""
        return self.num_heads // self.num_kv_heads


class Tables(NamedTuple):
    """The pages of the sequences: int32 [rows, pages], and for each row of the step its row there, int64 [rows]."""

    pages: Tensor
    rows: Tensor


class Tiles(NamedTuple):
    """The queries of a prefill: int32 [tiles, 4], for each tile its row, first token, first position, tokens."""

    places: Tensor
    number: int


def prefill_tiles(shape: Shape, spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Cuts rows into tiles. spans: the first token, number of tokens and first position of each row."""
    size = QUERIES // shape.group
    return [
        (row, first + at, start + at, min(size, length - at))
        for row, (first, length, start) in enumerate(spans)
        for at in range(0, length, size)
    ]


def decode(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tables,
    positions: Tensor,
    num_sections: int,
    shape: Shape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with one query a row: q [rows, heads, head_dim], contiguous -> the same shape.

    pages: of keys and of values, each [pages, page size, kv heads, head_dim], contiguous. positions: int64 [rows], of
    the queries. num_sections: no position is num_sections * SECTION or more. sinks: float32 [heads].
    """
    rows = q.shape[0]
    out = torch.empty_like(q)
    sums = torch.empty(rows, num_sections, shape.num_heads, shape.head_dim, dtype=torch.float32, device=q.device)
    peaks = torch.empty(rows, num_sections, shape.num_heads, 2, dtype=torch.float32, device=q.device)
    constants = launch(shape, pages[0].shape[1])
    width = tables.pages.shape[1]
    _decode[(rows, shape.num_kv_heads, num_sections)](
        q, *pages, tables.pages, tables.rows, positions, sums, peaks, width, **constants
    )
    constants = merge_launch(shape, has_sinks=sinks is not None)
    unused_or_sinks = q if sinks is None else sinks
    _merge[(rows, shape.num_heads)](sums, peaks, positions, unused_or_sinks, out, num_sections, **constants)
    return out


def prefill(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tables,
    tiles: Tiles,
    shape: Shape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with any number of queries a row: q [tokens, heads, head_dim], contiguous -> the same shape."""
    out = torch.empty_like(q)
    unused_or_sinks, width = q if sinks is None else sinks, tables.pages.shape[1]
    constants = launch(shape, pages[0].shape[1]) | {"HAS_SINKS": sinks is not None}
    _prefill[(tiles.number, shape.num_kv_heads)](
        q, *pages, tables.pages, tables.rows, tiles.places, unused_or_sinks, out, width, **constants
    )
    return out


def launch(shape: Shape, page_size: int) -> dict[str, Any]:
    """Returns the constants and options with which decode and prefill are compiled. Prefill also has HAS_SINKS."""
    return {
        "SCALE": shape.scale,
        "WINDOW": shape.window or 0,
        "SOFTCAP": shape.softcap or 0.0,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "DIM": shape.head_dim,
        "PAGE": page_size,
        "BLOCK_K": 32,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_dim)),
        "num_warps": 8 if shape.head_dim > 64 else 4,
        "num_stages": 2,
        "enable_fp_fusion": False,  # or the merge would round otherwise in one kernel than in the other
    }


def merge_launch(shape: Shape, *, has_sinks: bool) -> dict[str, Any]:
    """Returns the constants and options with which the merge of sections is compiled."""
    return {
        "WINDOW": shape.window or 0,
        "HAS_SINKS": has_sinks,
        "HEADS": shape.num_heads,
        "DIM": shape.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_dim)),
        "num_warps": 1,
        "enable_fp_fusion": False,
    }


def reference(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_rows: list[list[int]],
    spans: list[tuple[int, int, int]],
    shape: Shape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention in float64, row by row. spans: as in `prefill_tiles`; page_rows: the pages of each row."""
    out = torch.empty_like(q)
    for own, (first, length, start) in zip(page_rows, spans, strict=True):
        ends = torch.arange(start, start + length, device=q.device)[:, None]
        places = torch.arange(start + length, device=q.device)
        hidden = places > ends
        if shape.window is not None:
            hidden |= places <= ends - shape.window
        seen = ~hidden.all(dim=0)
        k, v = (
            torch.where(seen[:, None, None], each[own].flatten(0, 1)[: start + length], 0)
            .double()
            .repeat_interleave(shape.group, 1)
            for each in pages
        )
        scores = torch.einsum("qhd,khd->hqk", q[first : first + length].double(), k) * shape.scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, length, 1)), dim=-1)
        shares = scores.softmax(-1)[..., : start + length]
        out[first : first + length] = torch.einsum("hqk,khd->qhd", shares, v).to(q.dtype)
    return out


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["table_rows", "positions"])
def _decode(
    q,
    keys,
    values,
    tables,
    table_rows,
    positions,
    sums,
    peaks,
    table_width,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, kv_head, section = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    begin = _first_seen(position, WINDOW)
    if (section < begin // _SECTION) | (section > position // _SECTION):
        return
    places, dims = tl.arange(0, _QUERIES), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + places
    is_query = places < GROUP
    inside = is_query[:, None] & (dims < DIM)[None, :]
    own = (row.to(tl.int64) * KV_HEADS * GROUP + heads) * DIM
    queries = tl.load(q + own[:, None] + dims[None, :], inside, 0.0)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_width
    ends = places * 0 + position
    peak, weight, part = _sum_section(
        queries, keys, values, table, section, begin, position + 1, ends, kv_head, SCALE, WINDOW, SOFTCAP, KV_HEADS,
        DIM, PAGE, BLOCK_K, BLOCK_D
    )  # fmt: skip
    place = (row.to(tl.int64) * tl.num_programs(2) + section) * KV_HEADS * GROUP + heads
    tl.store(sums + place[:, None] * DIM + dims[None, :], part, inside)
    tl.store(peaks + place * 2, peak, is_query)
    tl.store(peaks + place * 2 + 1, weight, is_query)


@triton.jit(do_not_specialize=["table_width"])
def _prefill(
    q,
    keys,
    values,
    tables,
    table_rows,
    tiles,
    sinks,
    out,
    table_width,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    row, token, start, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    begin, end = _first_seen(start, WINDOW), start + length
    places, dims = tl.arange(0, _QUERIES), tl.arange(0, BLOCK_D)
    heads, offsets = kv_head * GROUP + places % GROUP, places // GROUP
    is_query = offsets < length
    inside = is_query[:, None] & (dims < DIM)[None, :]
    own = ((token + offsets).to(tl.int64) * KV_HEADS * GROUP + heads) * DIM
    queries = tl.load(q + own[:, None] + dims[None, :], inside, 0.0)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_width
    peak = tl.full((_QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((_QUERIES,), tl.float32)
    total = tl.zeros((_QUERIES, BLOCK_D), tl.float32)
    for section in range(begin // _SECTION, (end - 1) // _SECTION + 1):
        own_peak, own_weight, part = _sum_section(
            queries, keys, values, table, section, begin, end, start + offsets, kv_head, SCALE, WINDOW, SOFTCAP,
            KV_HEADS, DIM, PAGE, BLOCK_K, BLOCK_D
        )  # fmt: skip
        peak, old, new = _shrink(peak, own_peak)
        weight = weight * old + own_weight * new
        total = total * old[:, None] + part * new[:, None]
    if HAS_SINKS:
        peak, old, new = _shrink(peak, tl.load(sinks + heads) * _LOG2E)
        weight, total = weight * old + new, total * old[:, None]
    result = total / tl.where(is_query, weight, 1.0)[:, None]
    tl.store(out + own[:, None] + dims[None, :], result.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_sections"], do_not_specialize_on_alignment=["positions"])
def _merge(
    sums,
    peaks,
    positions,
    sinks,
    out,
    num_sections,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < DIM
    peak = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    single = tl.arange(0, 1)
    for section in range(_first_seen(position, WINDOW) // _SECTION, position // _SECTION + 1):
        place = (row * num_sections + section) * HEADS + head
        peak, old, new = _shrink(peak, tl.load(peaks + place * 2 + single))
        weight = weight * old + tl.load(peaks + place * 2 + 1 + single) * new
        total = total * old + tl.load(sums + place * DIM + dims, inside, 0.0) * new
    if HAS_SINKS:
        peak, old, new = _shrink(peak, tl.load(sinks + head + single) * _LOG2E)
        weight, total = weight * old + new, total * old
    tl.store(out + (row * HEADS + head) * DIM + dims, (total / weight).to(out.dtype.element_ty), inside)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """Returns the first position that the query at `position` sees."""
    return tl.maximum(0, position - WINDOW + 1) if WINDOW > 0 else position * 0


@triton.jit
def _shrink(peak, other):
    """Returns the larger of two peaks, and what sums relative to either are multiplied by to be relative to it."""
    larger = tl.maximum(peak, other)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(peak - finite), tl.exp2(other - finite)


@triton.jit
def _sum_section(
    queries,
    keys,
    values,
    table,
    section,
    begin,
    end,
    positions,
    kv_head,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the peaks, the sums of weights, and the weighted sums of values of a section, for each query.

    begin, end: the positions of keys that some query of the tile sees. positions: those of the queries.
    """
    dims = tl.arange(0, BLOCK_D)
    peak = tl.full((_QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((_QUERIES,), tl.float32)
    sums = tl.zeros((_QUERIES, BLOCK_D), tl.float32)
    low = tl.maximum(section * _SECTION, begin // BLOCK_K * BLOCK_K)
    for base in range(low, tl.minimum(section * _SECTION + _SECTION, end), BLOCK_K):
        at = base + tl.arange(0, BLOCK_K)
        is_key = (at >= begin) & (at < end)
        page = tl.load(table + at // PAGE, is_key, 0).to(tl.int64)
        place = (((page * PAGE + at % PAGE) * KV_HEADS + kv_head) * DIM)[:, None] + dims[None, :]
        inside = is_key[:, None] & (dims < DIM)[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(keys + place, inside, 0.0)), input_precision="ieee") * SCALE
        if SOFTCAP > 0:
            scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFTCAP)) + 1.0))
        is_seen = is_key[None, :] & (at[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * _LOG2E, float("-inf"))
        own = tl.max(scores, 1)
        peak, old, _ = _shrink(peak, own)
        shares = tl.exp2(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        weight = weight * old + tl.sum(shares, 1)
        own_values = tl.load(values + place, inside, 0.0)
        sums = tl.dot(shares.to(own_values.dtype), own_values, sums * old[:, None], input_precision="ieee")
    return peak, weight, sums
