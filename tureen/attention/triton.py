"""Paged attention by Triton kernels on CUDA devices: keys and values are read where they are.

The kernels are in `tureen/kernels/triton/attention.py`. Each layer's shape is compared with the reference at the start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tureen.attention import reference
from tureen.attention.base import (
    AttentionBackend,
    AttentionNeeds,
    HeadNorms,
    LayerShape,
    ModelInput,
    PageTables,
    Span,
)
from tureen.kernels.fused import are_near, probe_passes, why_no_triton

if TYPE_CHECKING:
    from tureen.kernels.triton.attention import Shape, Tables, Tiles

ATTENTION_BACKENDS = ("triton",)
PREFERENCE = 1

SIXTEEN_BITS = ("bfloat16", "float16")
LARGEST_HEAD = 256
MOST_SHARING = 64  # heads that share keys


def why_unsupported(needs: AttentionNeeds) -> str:
    """Returns why it cannot do what a model needs, or "" where it can."""
    if needs.device != "cuda":
        return f"it runs on CUDA devices, not on {needs.device}"
    if fault := why_no_triton():
        return fault
    if needs.dtype not in SIXTEEN_BITS:
        return f"it computes in bfloat16 and float16, not in {needs.dtype}"
    return next((fault for layer in needs.layers if (fault := _fault(layer))), "")


def _fault(layer: LayerShape) -> str:
    if layer.head_dim > LARGEST_HEAD:
        return f"heads have {layer.head_dim} numbers, and it has at most {LARGEST_HEAD}"
    if layer.num_heads // layer.num_kv_heads > MOST_SHARING:
        return f"more than {MOST_SHARING} heads share keys"
    return "it does not show pictures whole" if layer.sees_pictures_whole else ""


def make_backend(layers: Sequence[LayerShape], keys: Sequence[Tensor], values: Sequence[Tensor]) -> AttentionBackend:
    """Makes the backend over these pages; keys, values: see ReferenceAttention. It is the reference if a kernel fails
    here."""
    shapes = dict.fromkeys(zip(layers, (pages.shape[1] for pages in keys), strict=True))
    if not probe_passes("attention", lambda: all(_agrees(*each, keys[0]) for each in shapes)):
        return reference.make_backend(layers, keys, values)
    return TritonAttention(layers, keys, values)


class Singles(NamedTuple):
    """The rows of a step that have one query."""

    tokens: Tensor | None  # int64 [rows]: the places of their queries; None: all in order
    rows: Tensor  # int64 [rows]: their rows in the page tables
    positions: Tensor  # int64 [rows]
    num_sections: int  # of keys, at most


class TritonAttention:
    """The backend over pages [pages, page_size, kv_heads, head_dim] of each layer's keys and values."""

    def __init__(self, layers: Sequence[LayerShape], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._kernels = importlib.import_module("tureen.kernels.triton.attention")
        self._store = importlib.import_module("tureen.kernels.triton.rope_store")
        self._layers = tuple(layers)
        self._shapes: list[Shape] = [_shape(self._kernels, layer) for layer in layers]
        self._pages = list(zip(keys, values, strict=True))
        self._page_size = keys[0].shape[1]
        self._inputs: ModelInput
        self._tables: dict[bool, Tables] = {}  # whether they are of layers with a window
        self._tiles: dict[int, Tiles] = {}  # by the number of heads that share keys; none in a decode step
        self._singles: Singles | None = None

    def plan(self, inputs: ModelInput) -> None:
        self._inputs, self._tiles = inputs, {}
        spans, device = inputs.spans, inputs.token_ids.device
        kinds = {layer.window is not None for layer in self._layers}
        self._tables = {has_window: self._table(spans, has_window, device) for has_window in kinds}
        if any(span.length > 1 for span in spans):
            self._tiles = {shape.group: self._cut(shape, spans, device) for shape in self._shapes}
        self._singles = self._single_queries(spans, device)

    def plan_tables(self, inputs: ModelInput, tables: PageTables) -> None:
        self._inputs, self._tiles = inputs, {}
        own = self._kernels.Tables(tables.pages, tables.rows)
        self._tables = {False: own, True: own}
        self._singles = Singles(None, tables.rows, inputs.positions, self._sections(tables.num_keys))

    def _single_queries(self, spans: Sequence[Span], device: torch.device) -> Singles | None:
        """Returns the rows with one query; None if there is none."""
        rows = [row for row, span in enumerate(spans) if span.length == 1]
        if not rows:
            return None
        own = torch.tensor([(spans[row].first, row, spans[row].start) for row in rows]).T.contiguous().to(device)
        num_sections = self._sections(max(spans[row].start for row in rows) + 1)
        return Singles(own[0] if self._tiles else None, own[1], own[2], num_sections)

    def _sections(self, num_keys: int) -> int:
        return -(-num_keys // int(self._kernels.SECTION))

    def store_rotated(
        self, qkv: Tensor, layer: int, rotation: tuple[Tensor, Tensor, bool], norms: HeadNorms | None
    ) -> Tensor:
        shape, store = self._shapes[layer], self._store
        cos, sin, is_interleaved = rotation
        rope = store.Rope(cos.flatten(1), sin.flatten(1), is_interleaved)
        heads = store.Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        slots = self._inputs.slots_of(shape.window)
        queries: Tensor = store.rope_store(qkv, heads, rope, norms, slots, self._pages[layer])
        return queries

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, sinks: Tensor | None = None) -> Tensor:
        shape, pages = self._layers[layer], self._pages[layer]
        slots = self._inputs.slots_of(shape.window)
        for stored, new in zip(pages, (k, v), strict=True):
            if new is not None:
                stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, new)
        tables, own, q = self._tables[shape.window is not None], self._shapes[layer], q.contiguous()
        out = q
        if self._tiles:
            out = self._kernels.prefill(q, pages, tables, self._tiles[own.group], own, sinks)
        if self._singles is not None:
            tokens, rows, positions, num_sections = self._singles
            part = q if tokens is None else q.index_select(0, tokens)
            tables = tables._replace(rows=rows)
            drawn = self._kernels.decode(part, pages, tables, positions, num_sections, own, sinks)
            out = drawn if tokens is None else out.index_copy_(0, tokens, drawn)
        return out.flatten(1)

    def _table(self, spans: Sequence[Span], has_window: bool, device: torch.device) -> Tables:
        rows = [span.window_pages if has_window and span.window_pages else span.pages for span in spans]
        table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for places, pages in zip(table, rows, strict=True):
            places[: len(pages)] = pages
        tables: Tables = self._kernels.Tables(
            torch.from_numpy(table).to(device), torch.arange(len(rows), device=device)
        )
        return tables

    def _cut(self, shape: Shape, spans: Sequence[Span], device: torch.device) -> Tiles:
        cut = self._kernels.prefill_tiles(shape, [(span.first, span.length, span.start) for span in spans])
        places = [tile for tile in cut if spans[tile[0]].length > 1]
        tiles: Tiles = self._kernels.Tiles(torch.tensor(places, dtype=torch.int32).to(device), len(places))
        return tiles


def _shape(kernels: Any, layer: LayerShape) -> Shape:
    shape: Shape = kernels.Shape(*layer[:6])
    return shape


def _agrees(layer: LayerShape, page_size: int, like: Tensor) -> bool:
    """Returns whether the kernels compute what the reference does: three tokens after 513, as one piece and alone."""
    kernels = importlib.import_module("tureen.kernels.triton.attention")
    generator = torch.Generator(like.device).manual_seed(0)
    shape, num_keys = _shape(kernels, layer), kernels.SECTION + 4
    num_pages = -(-num_keys // page_size)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=like.device).to(like.dtype)

    pages = tuple([numbers(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for _ in range(2)])
    q = numbers(3, layer.num_heads, layer.head_dim)
    sinks = torch.zeros(layer.num_heads, device=like.device) if layer.has_sinks else None
    spans = [(0, 3, num_keys - 3)]
    order = torch.arange(num_pages, dtype=torch.int32, device=like.device)[None]
    tables = kernels.Tables(order, torch.zeros(1, dtype=torch.int64, device=like.device))
    places = kernels.prefill_tiles(shape, spans)
    tiles = kernels.Tiles(torch.tensor(places, dtype=torch.int32, device=like.device), len(places))
    whole = kernels.prefill(q, pages, tables, tiles, shape, sinks)
    position = torch.tensor([num_keys - 1], device=like.device)
    alone = kernels.decode(q[2:].clone(), pages, tables, position, 2, shape, sinks)
    expected = kernels.reference(q, pages, [list(range(num_pages))], spans, shape, sinks)
    return are_near(whole, expected) and are_near(alone, expected[2:]) and _stores(shape, numbers, pages)


def _stores(shape: Shape, numbers: Callable[..., Tensor], pages: tuple[Tensor, ...]) -> bool:
    """Returns whether queries, keys and values are rotated and stored as the reference does it."""
    store, like = importlib.import_module("tureen.kernels.triton.rope_store"), pages[0]
    heads = store.Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    qkv = numbers(3, (heads.queries + 2 * heads.keys) * heads.size)
    angles = numbers(3, heads.size).float()
    rope = store.Rope(angles.cos(), angles.sin(), False)
    slots = torch.tensor([2, 0, 1], device=like.device)
    results = []
    for function in (store.rope_store, store.reference):
        own = tuple([torch.zeros_like(each) for each in pages])
        results.append((function(qkv, heads, rope, None, slots, own), *own))
    return all(are_near(*pair) for pair in zip(*results, strict=True))
