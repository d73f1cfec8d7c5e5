"""A step's input as tensors, and the interface of an attention backend. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class Span(NamedTuple):
    """A row's share of the step's tokens: positions start … start + length - 1 are tokens[first : first + length]."""

    first: int
    length: int
    start: int
    pages: tuple[int, ...]
    state_from: int = -1  # see contract.runner.Row
    state_to: int = -1
    state_saves: tuple[tuple[int, int], ...] = ()
    window_pages: tuple[int, ...] = ()  # in place of `pages`, for layers with a window; empty: they are in `pages`
    pictures: tuple[tuple[int, int], ...] = ()  # see contract.runner.Row

    def pages_of(self, window: int | None) -> tuple[int, ...]:
        """Returns the page table of layers with this window. Entries before the window may be any page."""
        return self.window_pages if window is not None and self.window_pages else self.pages


class PageTables(NamedTuple):
    """Page tables on the device, for steps of one token a row that are captured and replayed."""

    pages: Tensor  # int32 [tables, pages]
    rows: Tensor  # int64 [tokens]: the table of each token
    num_keys: int  # no token's position is this or more


class ModelInput(NamedTuple):
    """The tensors of one step. Tokens of all rows stand one after another."""

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    kv_slots: Tensor  # int64 [tokens]: page * page_size + offset, where the token's K/V are stored
    spans: tuple[Span, ...]  # one per row; none if there are PageTables
    sampled: Tensor | None  # int64 [draws]: tokens after which one is drawn; None = no row samples
    embedded: tuple[Tensor, Tensor] | None = None  # int64 [k]: tokens given as embeddings; these, float32 [k, hidden]
    places: Tensor | None = None  # int64 [tokens, 3]: frames, rows, columns that turn vectors; None: all are positions
    window_slots: Tensor | None = None  # in place of kv_slots, for layers with a window; None: they are in kv_slots

    def slots_of(self, window: int | None) -> Tensor:
        """Returns where layers with this window store the K/V of each token, int64 [tokens]."""
        return self.kv_slots if window is None or self.window_slots is None else self.window_slots


class LayerShape(NamedTuple):
    """The sizes and the scale of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token sees itself and the window - 1 tokens before it; None = all before it
    softcap: float | None = None  # c: scores become c * tanh(score / c)
    has_sinks: bool = False  # each head has one more score in its softmax, which belongs to no token (arXiv:2309.17453)
    sees_pictures_whole: bool = False  # a picture's tokens see all of it, also those after them


class AttentionNeeds(NamedTuple):
    """A model's demands on its attention backend."""

    device: str  # cpu or cuda
    dtype: str  # of queries, keys and values: float32, bfloat16, float16
    layers: tuple[LayerShape, ...]
    page_size: int  # tokens


class AttentionBackend(Protocol):
    """Stores K/V in pages and attends to them."""

    def plan(self, inputs: ModelInput) -> None:
        """Prepares what all layers share. Called once per step, before `forward`."""

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, sinks: Tensor | None = None) -> Tensor:
        """Attends: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim].

        The new K/V are stored first; each token then attends to the positions up to its own, or up to the end of its
        picture where the layer sees pictures whole. v: None if values are a part of the keys; k: None, too, if both are
        stored already. layer: the index of the layer. sinks: float32 [heads], for layers that have them.
        """


class HeadNorms(NamedTuple):
    """The norms of each head's queries and keys before the rotation: weights float32 [head_dim]."""

    queries: Tensor
    keys: Tensor
    eps: float


@runtime_checkable
class CapturedBackend(AttentionBackend, Protocol):
    """A backend whose steps can be captured and replayed."""

    def plan_tables(self, inputs: ModelInput, tables: PageTables) -> None:
        """Prepares a step of one token a row; replaces `plan`. The input has no spans.

        Everything is computed on the device. Shapes depend on the number of rows and on `tables.num_keys` only.
        """


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend with one kernel for all work between the projection and attention."""

    def store_rotated(
        self, qkv: Tensor, layer: int, rotation: tuple[Tensor, Tensor, bool], norms: HeadNorms | None
    ) -> Tensor:
        """Normalises and rotates queries and keys, stores keys and values, and returns queries for `forward`.

        qkv [tokens, (heads + 2 * kv_heads) * head_dim]. rotation: cos and signed sin, [tokens, 1, rotated dimensions],
        and whether pairs are neighbours. Returns [tokens, heads, head_dim].
        """
