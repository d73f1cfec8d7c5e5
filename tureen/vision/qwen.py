"""The vision transformer of Qwen's models: turns pictures of any resolution into embeddings of the language model.

Patches are ordered token by token: the patches of one token are adjacent, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import RequestFailed
from tureen.media.qwen_vision import QwenVision
from tureen.vision.arrays import Array, Arrays, Matrix, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.resampling import linear_taps, resampled
from tureen.vision.tower import MIN_ROWS, attend, blocks, cut, product

EPS = 1e-6
Numbers = NDArray[np.int64]


class Grid(NamedTuple):
    """The places of a picture's patches, as layers need them."""

    cos: Array  # [patches, head size / 2], of the angles that turn queries and keys
    sin: Array
    windows: list[slice]  # patches that see each other in layers with windows; empty: all layers see all


class QwenEmbedder:
    """The PictureEmbedder of Qwen's models. weights: those of `QwenVision.weights`; piece: see Tower."""

    def __init__(self, config: QwenVision, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._config = config
        self._arrays = arrays
        self._weights = weights
        self._piece = piece

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds one picture [1, 3, height, width], normalised: returns [tokens, hidden_size], with deep layers
        [tokens, (1 + deep layers) * hidden_size]. Yields as Tower does."""
        config = self._config
        count, _, height, width = pictures.shape
        if layout or count != 1 or height % config.token_side or width % config.token_side:
            raise RequestFailed(f"the model does not take {count} tiles of {height} x {width} pixels laid out so")
        tokens = np.arange(height * width // config.token_side**2).reshape(height // config.token_side, -1)
        order, sizes = _in_windows(tokens, config.window)
        patches = self._patch_order(height // config.patch_size, width // config.patch_size, order)
        hidden = yield from self._embed_patches(pictures[0], patches)
        grid = self._grid(width // config.patch_size, patches, sizes)
        merged = []
        for layer in range(config.num_layers):
            is_full = not grid.windows or layer in config.full_layers
            yield from self._run_layer(hidden, f"layers.{layer}", grid, [slice(None)] if is_full else grid.windows)
            if layer in config.deep_layers:
                index = config.deep_layers.index(layer)
                merged.append((yield from self._merge(hidden, f"deep.{index}", is_merged_first=True)))
        merged.insert(0, (yield from self._merge(hidden, "merger", is_merged_first=False)))
        return self._arrays.concat(merged, axis=1)[self._arrays.constant(order.argsort())]

    def _patch_order(self, rows: int, columns: int, order: Numbers) -> Numbers:
        """Returns the numbers of all patches token by token; order: of tokens."""
        merge = self._config.merge
        numbers = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        return numbers.swapaxes(1, 2).reshape(-1, merge**2)[order].reshape(-1)

    def _embed_patches(self, pixels: Array, order: Numbers) -> Work:
        arrays, size, frames = self._arrays, self._config.patch_size, self._config.num_frames
        grid = cut(pixels, size)
        rows, columns, numbers = grid.shape[0], grid.shape[1], arrays.constant(order)
        patches = grid.reshape(len(order), 3, 1, size**2)[numbers]
        inputs = arrays.concat([patches] * frames, axis=2).reshape(len(order), -1)
        kernel, bias = self._weights["patches.weight"], self._weights.get("patches.bias")
        hidden = yield from product(arrays, inputs, kernel, self._piece, bias)
        if side := self._config.table_side:
            table = self._weights["positions"].reshape(side, side, -1)
            down, across = (linear_taps(side, new, keeps_ends=True) for new in (rows, columns))
            hidden += resampled(arrays, table, down, across).reshape(len(order), -1)[numbers]
        return hidden

    def _grid(self, columns: int, order: Numbers, sizes: list[int]) -> Grid:
        config = self._config
        quarter = config.hidden_size // config.num_heads // 4
        exponents = np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
        places = np.stack([order // columns, order % columns], axis=1).astype(np.float32)
        angles = (places[:, :, None] / np.float32(config.theta) ** exponents).reshape(len(order), -1)
        ends = [count * config.merge**2 for count in accumulate(sizes, initial=0)]
        windows = [slice(start, end) for start, end in pairwise(ends)]
        cos, sin = (self._arrays.constant(function(angles)) for function in (np.cos, np.sin))
        return Grid(cos, sin, windows if config.window else [])

    def _run_layer(self, hidden: Array, name: str, grid: Grid, spans: list[slice]) -> Iterator[int]:
        """Adds to `hidden` in place. spans: patches that see each other."""
        mixed = yield from self._attend(hidden, name, grid, spans)
        parts = ("out", "gate", "up", "down") if self._config.has_gates else ("out", "up", "down")
        row_flops = sum(self._weights[f"{name}.{part}.weight"].flops for part in parts)
        for rows in blocks(len(hidden), row_flops, self._piece, MIN_ROWS):
            part = hidden[rows]
            part += self._linear(mixed[rows], f"{name}.out")
            normed = self._norm(part, f"{name}.norm2")
            inner = self._linear(normed, f"{name}.gate" if self._config.has_gates else f"{name}.up")
            inner = self._arrays.activate(inner, self._config.activation)
            if self._config.has_gates:
                inner *= self._linear(normed, f"{name}.up")
            part += self._linear(inner, f"{name}.down")
            yield len(part) * row_flops

    def _attend(self, hidden: Array, name: str, grid: Grid, spans: list[slice]) -> Work:
        """Returns [patches, hidden_size], the heads side by side."""
        size, width = hidden.shape
        num_heads = self._config.num_heads
        projected = self._arrays.empty(size, 3, num_heads, width // num_heads)
        row_flops = 6 * width * width
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            part = projected[rows]
            normed = self._norm(hidden[rows], f"{name}.norm1")
            part[:] = self._linear(normed, f"{name}.qkv").reshape(*part.shape)
            for turned in (part[:, 0], part[:, 1]):
                self._arrays.rotate(turned, grid.cos[rows], grid.sin[rows])
            yield len(normed) * row_flops
        q, k, v = projected.swapaxes(0, 1)
        return (yield from attend(self._arrays, q, k, v, self._piece, spans=spans))

    def _merge(self, hidden: Array, name: str, *, is_merged_first: bool) -> Work:
        """Merges the patches of each token: returns [tokens, hidden_size of the language model].

        is_merged_first: the norm is of the joined patches, not of each.
        """
        wide = hidden.reshape(-1, hidden.shape[1] * self._config.merge**2)
        first: Matrix = self._weights[f"{name}.fc1.weight"]
        second: Matrix = self._weights[f"{name}.fc2.weight"]
        merged = self._arrays.empty(len(wide), second.rows)
        row_flops = first.flops + second.flops
        for rows in blocks(len(wide), row_flops, self._piece, MIN_ROWS):
            part = wide[rows] if is_merged_first else wide[rows].reshape(-1, hidden.shape[1])
            normed = self._norm(part, f"{name}.norm").reshape(-1, wide.shape[1])
            inner = self._arrays.activate(self._linear(normed, f"{name}.fc1"), "gelu")
            merged[rows] = self._linear(inner, f"{name}.fc2")
            yield len(inner) * row_flops
        return merged

    def _linear(self, x: Array, name: str) -> Array:
        return self._arrays.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Array, name: str) -> Array:
        weight = self._weights[f"{name}.weight"]
        if self._config.has_gates:
            return self._arrays.rms_norm(x, weight, EPS)
        return self._arrays.layer_norm(x, weight, self._weights[f"{name}.bias"], EPS)


def make(vision: QwenVision, arrays: Arrays, weights: Weights, piece: int) -> QwenEmbedder:
    """Makes the PictureEmbedder of a Qwen."""
    return QwenEmbedder(vision, arrays, weights, piece)


def _in_windows(tokens: Numbers, side: int) -> tuple[Numbers, list[int]]:
    """Returns the numbers of tokens [rows, columns] window by window, and how many each window has. side: of a window,
    in tokens; 0: all tokens are one window."""
    if not side:
        return tokens.reshape(-1), [tokens.size]
    tops, lefts = range(0, tokens.shape[0], side), range(0, tokens.shape[1], side)
    windows = [tokens[top : top + side, left : left + side].reshape(-1) for top in tops for left in lefts]
    return np.concatenate(windows), [len(window) for window in windows]
