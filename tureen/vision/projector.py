"""Projects a tower's features to embeddings of the language model, and joins those of tiles to a picture's."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tureen.media.tiles import Layout
from tureen.vision.picture_embedder import Work
from tureen.vision.tower import ACTIVATIONS, MIN_ROWS, blocks


class Projector:
    """A two-layer mlp. weights: fc1 and fc2 of `VisionConfig.weights`; piece: see Tower."""

    def __init__(self, activation: str, weights: Mapping[str, Tensor], piece: int) -> None:
        self._activate = ACTIVATIONS[activation]
        self._weights = weights
        self._piece = piece

    def project(self, features: Tensor) -> Work:
        """Projects features [tokens, features]: returns [tokens, hidden_size]. Yields as Tower does."""
        first, second = self._weights["fc1.weight"], self._weights["fc2.weight"]
        embeddings = features.new_empty(len(features), len(second))
        row_flops = 2 * (first.numel() + second.numel())
        for rows in blocks(len(features), row_flops, self._piece, MIN_ROWS):
            inner = self._activate(functional.linear(features[rows], first, self._weights.get("fc1.bias")))
            embeddings[rows] = functional.linear(inner, second, self._weights.get("fc2.bias"))
            yield len(features[rows]) * row_flops
        return embeddings


class Merger:
    """Makes a feature of each square of patches. weights: those of the merger in `VisionConfig.weights`; piece: see
    Tower."""

    def __init__(self, size: int, eps: float, weights: Mapping[str, Tensor], piece: int) -> None:
        self._size = size  # patches along a square's side
        self._eps = eps
        self._weights = weights
        self._piece = piece

    def merge(self, features: Tensor, columns: int) -> Work:
        """Merges features [patches, features] in rows of `columns`: returns [squares, features]. Yields as Tower
        does."""
        width, weight = features.shape[-1], self._weights["weight"]
        normed = functional.rms_norm(features, (width,), self._weights["norm.weight"], self._eps)
        grid = normed.view(-1, self._size, columns // self._size, self._size, width)
        squares = grid.permute(0, 2, 4, 1, 3).reshape(-1, width * self._size**2)
        merged = features.new_empty(len(squares), len(weight))
        for rows in blocks(len(squares), 2 * weight.numel(), self._piece, MIN_ROWS):
            merged[rows] = functional.linear(squares[rows], weight)
            yield 2 * len(merged[rows]) * weight.numel()
        return merged


def with_tiles(tiles: Tensor, layout: Layout, newline: Tensor) -> Tensor:
    """Joins the projected features of a picture's tiles: [1 + tiles, features, hidden_size] -> [tokens, hidden_size].

    The whole picture comes first, then its rows, each followed by `newline`.
    """
    whole, hidden = tiles[0], tiles.shape[-1]
    side = math.isqrt(tiles.shape[1])
    rows = tiles[1:].reshape(layout.rows, layout.columns, side, side, hidden)
    large = rows.transpose(1, 2).reshape(layout.rows * side, layout.columns * side, hidden)
    kept = large[layout.top : layout.top + layout.height, layout.left : layout.left + layout.width]
    if (layout.new_height, layout.new_width) != (layout.height, layout.width):
        kept = _resampled(kept[None], (layout.new_height, layout.new_width))[0]
    ends = newline.expand(len(kept), 1, hidden)
    return torch.cat([whole, torch.cat([kept, ends], dim=1).reshape(-1, hidden)])


def of_frames(frames: Tensor, pooled: tuple[int, int], newline: Tensor) -> Tensor:
    """Joins the projected features of a video: [frames, features, hidden_size] -> [tokens, hidden_size].

    Each frame is resampled to pooled[0] x pooled[1] features; one `newline` ends the video.
    """
    side, hidden = math.isqrt(frames.shape[1]), frames.shape[-1]
    small = _resampled(frames.reshape(-1, side, side, hidden), pooled)
    return torch.cat([small.reshape(-1, hidden), newline[None]])


def _resampled(grids: Tensor, size: tuple[int, int]) -> Tensor:
    """Resamples grids [grids, height, width, hidden_size] to another size, bilinearly."""
    return functional.interpolate(grids.permute(0, 3, 1, 2), size, mode="bilinear").permute(0, 2, 3, 1)
