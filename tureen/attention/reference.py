"""Paged attention in plain torch: gather a group's pages, then one scaled dot product. Any device.

The result of a query does not depend on what it is batched with. Keys are gathered from position 0 (or from a
multiple of KEY_BLOCK, where a sliding window begins later), padded to fixed sizes, and masked with -inf, so that
padding adds exact zeros to sums of one fixed order; queries are padded likewise. On a CPU the sizes are those that a
probe has found to give the same bits: see `tiles.py`. There float16 is computed in float32. On other devices it holds
as far as their kernel does. Padding repeats the row's own first key: a page's unused places may hold anything, NaN
too, and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tureen.attention.base import AttentionBackend, AttentionNeeds, LayerShape, ModelInput, PageTables, Span
from tureen.attention.tiles import KEY_BLOCK, Tiles, scaled_dot_product, tiles

ATTENTION_BACKENDS = ("reference",)
PREFERENCE = 0  # any other that can is faster

QUERY_PIECE = 256  # queries of one row attended at once
MASK_ELEMENTS = 1 << 24  # most elements of one group's mask
LEAST_BUCKET = 256  # rows with at most this many keys share a group


def why_unsupported(needs: AttentionNeeds) -> str:
    """Returns "": plain torch can do all that a model needs, on any device."""
    return ""


def make_backend(layers: Sequence[LayerShape], keys: Sequence[Tensor], values: Sequence[Tensor]) -> AttentionBackend:
    """Makes the backend over these pages; keys, values: see ReferenceAttention."""
    return ReferenceAttention(layers, keys, values)


class LayerKind(NamedTuple):
    """A description of the layers that share groups."""

    window: int | None
    heads_per_kv: int
    sees_pictures_whole: bool


class QueryPiece(NamedTuple):
    """Consecutive queries of one row."""

    span: Span
    begin: int  # index of the first query in the span
    length: int

    def num_keys(self, kind: LayerKind) -> int:
        """Returns the position after the last one that a query sees."""
        last = self.span.start + self.begin + self.length
        pictures = self.span.pictures if kind.sees_pictures_whole else ()
        return max([last, *(end for start, end in pictures if start < last)])

    def widen(self, ends: np.ndarray) -> None:
        """Makes queries of pictures see all of these. ends: the positions after each query's own, int64 [queries]."""
        for start, end in self.span.pictures:
            ends[(ends > start) & (ends < end)] = end


class QueryGroup(NamedTuple):
    """Pieces of similar shape, attended in one call."""

    tokens: (
        Tensor | None
    )  # int64 [rows * queries], short pieces padded with their last token; None = all tokens in order
    queries: int
    key_slots: Tensor  # int64 [rows * keys]
    mask: Tensor  # [rows, 1, heads per kv head * queries and padding, keys]: 0 or -inf


class ReferenceAttention:
    """The backend that every other is compared with.

    keys, values: for each layer a tensor [pages, page_size, kv_heads, head_dim].
    """

    def __init__(self, layers: Sequence[LayerShape], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._layers = tuple(layers)
        self._page_size = keys[0].shape[1]
        self._keys = [pool.view(-1, *pool.shape[2:]) for pool in keys]
        self._values = [pool.view(-1, *pool.shape[2:]) for pool in values]
        self._device = keys[0].device
        self._dtype = _computed_dtype(keys[0].dtype, self._device)
        for layer in dict.fromkeys(self._layers):
            self._tiles(layer)  # now rather than while somebody waits
        self._inputs: ModelInput | None = None
        self._groups: dict[LayerKind, list[QueryGroup]] = {}

    def plan(self, inputs: ModelInput) -> None:
        self._inputs = inputs
        self._groups = {}
        for layer in self._layers:
            kind = _kind(layer)
            if kind not in self._groups:
                sizes = self._tiles(layer)
                split = _split(_pieces(inputs.spans, sizes.most_queries(kind.heads_per_kv)), kind)
                self._groups[kind] = [self._group(part, kind, sizes, inputs, alone=len(split) == 1) for part in split]

    def plan_tables(self, inputs: ModelInput, tables: PageTables) -> None:
        self._inputs = inputs
        self._groups = {
            _kind(layer): [self._group_on_device(_kind(layer), self._tiles(layer), inputs, tables)]
            for layer in {_kind(each): each for each in self._layers}.values()
        }

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, sinks: Tensor | None = None) -> Tensor:
        shape, keys, values = self._layers[layer], self._keys[layer], self._values[layer]
        assert self._inputs is not None, "plan comes first"
        slots = self._inputs.slots_of(shape.window)
        if k is not None:
            keys.index_copy_(0, slots, k)
        if v is not None:
            values.index_copy_(0, slots, v)
        groups = self._groups[_kind(shape)]
        if len(groups) == 1 and groups[0].tokens is None:
            return _attend(q, keys, values, groups[0], shape, sinks)
        out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        for group in groups:
            if group.tokens is None:
                out.copy_(_attend(q, keys, values, group, shape, sinks))
            else:
                own = q.index_select(0, group.tokens)
                out.index_copy_(0, group.tokens, _attend(own, keys, values, group, shape, sinks))
        return out

    def _tiles(self, layer: LayerShape) -> Tiles:
        return tiles(layer.num_kv_heads, layer.head_dim, layer.softcap, layer.has_sinks, self._dtype, self._device)

    def _group(
        self, pieces: list[QueryPiece], kind: LayerKind, sizes: Tiles, inputs: ModelInput, *, alone: bool
    ) -> QueryGroup:
        window, heads_per_kv = kind.window, kind.heads_per_kv
        queries = max(piece.length for piece in pieces)
        ends = np.array([piece.num_keys(kind) for piece in pieces])
        first = _first_key(pieces, window)
        width = sizes.padded_keys(int(ends.max()) - first)
        slots = self._key_slots(pieces, window, range(first, first + width), ends)
        offsets = np.minimum(np.arange(queries), np.array([[piece.length - 1] for piece in pieces]))
        tokens = offsets + np.array([[piece.span.first + piece.begin] for piece in pieces])
        positions = offsets + np.array([[piece.span.start + piece.begin] for piece in pieces])
        in_order = alone and tokens.size == inputs.token_ids.shape[0]
        device = inputs.token_ids.device
        bounds = np.stack([np.zeros_like(positions), positions + 1])
        if window is not None:
            np.maximum(0, positions - window + 1, out=bounds[0])
        if kind.sees_pictures_whole:
            for piece, own in zip(pieces, bounds[1], strict=True):
                piece.widen(own)
        mask = _mask(torch.from_numpy(bounds).to(device), first, width, self._dtype)
        padded = sizes.padded_queries(heads_per_kv * queries)
        if queries > 1:
            mask = functional.pad(mask.repeat(1, heads_per_kv, 1), (0, 0, 0, padded - heads_per_kv * queries))
        return QueryGroup(
            None if in_order else torch.from_numpy(tokens.reshape(-1)).to(device),
            queries,
            torch.from_numpy(slots.reshape(-1)).to(device),
            mask[:, None].expand(-1, 1, padded, -1),
        )

    def _group_on_device(self, kind: LayerKind, sizes: Tiles, inputs: ModelInput, tables: PageTables) -> QueryGroup:
        """Returns the group of a step with one token a row. Everything is computed on the device, in fixed shapes."""
        size, width, device = self._page_size, sizes.padded_keys(tables.num_keys), inputs.positions.device
        pages = tables.pages.index_select(0, tables.rows)[:, : -(-width // size)].long()
        slots = (pages[:, :, None] * size + torch.arange(size, device=device)).flatten(1)[:, :width]
        first = inputs.positions - (kind.window - 1) if kind.window is not None else inputs.positions * 0
        bounds = torch.stack((first.clamp_(min=0), inputs.positions + 1))[:, :, None]
        places = torch.arange(width, device=device)
        is_seen = (places >= bounds[0]) & (places < bounds[1])
        slots = torch.where(is_seen, slots, slots.gather(1, bounds[0]))
        mask = _mask(bounds, 0, width, self._dtype)
        padded = sizes.padded_queries(kind.heads_per_kv)
        return QueryGroup(None, 1, slots.reshape(-1), mask[:, None].expand(-1, 1, padded, -1))

    def _key_slots(
        self, pieces: list[QueryPiece], window: int | None, positions: range, ends: np.ndarray
    ) -> np.ndarray:
        """Returns the slot of each position, int64 [rows, positions]. Positions that a row does not see use the slot of
        the first key that it sees."""
        size = self._page_size
        begin, end = positions.start // size, -(-positions.stop // size)
        pages = np.zeros((len(pieces), end - begin), dtype=np.int64)
        for row, piece in zip(pages, pieces, strict=True):
            own = piece.span.pages_of(window)[begin:end]
            row[: len(own)] = own
        slots = (pages[:, :, None] * size + np.arange(size)).reshape(len(pieces), -1)
        slots = slots[:, positions.start - begin * size :][:, : len(positions)]
        starts = [_first_seen(piece, window) for piece in pieces]
        first_seen = np.take_along_axis(slots, np.array(starts)[:, None] - positions.start, axis=1)
        places = np.array(positions)
        is_seen = (places >= np.array(starts)[:, None]) & (places < ends[:, None])
        return np.where(is_seen, slots, first_seen)


def _computed_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which attention is computed: on a CPU, float32 for float16.

    torch's float16 products round scores by the number of queries. Rounding probabilities to 16 bits hides that from
    the probe of `tiles`.
    """
    return torch.float32 if device.type == "cpu" and dtype == torch.float16 else dtype


def _kind(layer: LayerShape) -> LayerKind:
    return LayerKind(layer.window, layer.num_heads // layer.num_kv_heads, layer.sees_pictures_whole)


def _pieces(spans: Sequence[Span], most: int) -> list[QueryPiece]:
    most = min(most, QUERY_PIECE)
    return [
        QueryPiece(span, begin, min(most, span.length - begin))
        for span in spans
        for begin in range(0, span.length, most)
    ]


def _split(pieces: list[QueryPiece], kind: LayerKind) -> list[list[QueryPiece]]:
    """Pieces with about the same number of queries and of keys together, as many as the mask's size allows."""
    buckets: dict[tuple[int, int], list[QueryPiece]] = {}
    for piece in pieces:
        bucket = _power_of_two(piece.length), _power_of_two(max(LEAST_BUCKET, piece.num_keys(kind)))
        buckets.setdefault(bucket, []).append(piece)
    groups = []
    for (queries, keys), members in buckets.items():
        most = max(1, MASK_ELEMENTS // (queries * keys * kind.heads_per_kv))
        groups += [members[i : i + most] for i in range(0, len(members), most)]
    return groups


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _first_key(pieces: list[QueryPiece], window: int | None) -> int:
    """Returns the first position gathered: a multiple of KEY_BLOCK that no query's window begins before."""
    if window is None:
        return 0
    return min(_first_seen(piece, window) for piece in pieces) // KEY_BLOCK * KEY_BLOCK


def _first_seen(piece: QueryPiece, window: int | None) -> int:
    """Returns the first position that a query of the piece sees."""
    return 0 if window is None else max(0, piece.span.start + piece.begin - window + 1)


def _mask(bounds: Tensor, first: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns [rows, queries, width]: 0 where the query sees the key, else -inf. bounds: int64 [2, rows, queries], the
    first position that each query sees, and the one after the last."""
    keys = torch.arange(first, first + width, device=bounds.device)
    hidden = (keys < bounds[0, ..., None]) | (keys >= bounds[1, ..., None])
    return torch.zeros(hidden.shape, dtype=dtype, device=bounds.device).masked_fill_(hidden, float("-inf"))


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, group: QueryGroup, shape: LayerShape, sinks: Tensor | None
) -> Tensor:
    """Attends: q [rows * queries, heads, head_dim] -> [rows * queries, heads * head_dim]. Heads that share keys become
    queries."""
    rows, queries, kv_heads = group.mask.shape[0], group.queries, shape.num_kv_heads
    dtype = group.mask.dtype
    k = keys.index_select(0, group.key_slots).view(rows, -1, kv_heads, shape.head_dim).transpose(1, 2).to(dtype)
    v = values.index_select(0, group.key_slots).view(rows, -1, kv_heads, shape.head_dim).transpose(1, 2).to(dtype)
    q = q.to(dtype).reshape(rows, queries, kv_heads, -1, shape.head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, shape.head_dim)
    length = q.shape[2]
    padding = group.mask.shape[2] - length
    q = functional.pad(q, (0, 0, 0, padding))
    if sinks is not None:
        sinks = functional.pad(sinks.view(kv_heads, -1).repeat_interleave(queries, dim=1), (0, padding))
    out = scaled_dot_product(q, k, v, group.mask, shape.scale, shape.softcap, sinks)[:, :, :length]
    out = out.reshape(rows, kv_heads, -1, queries, shape.head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * queries, -1).to(keys.dtype)
