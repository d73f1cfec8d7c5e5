"""Projects a tower's features to embeddings of the language model, and joins those of tiles to a picture's."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

from tureen.media.tiles import Layout
from tureen.vision.arrays import Array, Arrays, Matrix, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.resampling import linear_taps, resampled
from tureen.vision.tower import MIN_ROWS, blocks, product


class Projector:
    """A two-layer mlp. weights: fc1 and fc2 of `VisionConfig.weights`; piece: see Tower."""

    def __init__(self, activation: str, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._activation = activation
        self._arrays = arrays
        self._weights = weights
        self._piece = piece

    def project(self, features: Array) -> Work:
        """Projects features [tokens, features]: returns [tokens, hidden_size]. Yields as Tower does."""
        arrays, weights = self._arrays, self._weights
        first: Matrix = weights["fc1.weight"]
        second: Matrix = weights["fc2.weight"]
        embeddings = arrays.empty(len(features), second.rows)
        row_flops = first.flops + second.flops
        for rows in blocks(len(features), row_flops, self._piece, MIN_ROWS):
            inner = arrays.activate(arrays.linear(features[rows], first, weights.get("fc1.bias")), self._activation)
            embeddings[rows] = arrays.linear(inner, second, weights.get("fc2.bias"))
            yield len(inner) * row_flops
        return embeddings


class Merger:
    """Makes a feature of each square of patches. weights: those of the merger in `VisionConfig.weights`; piece: see
    Tower."""

    def __init__(self, size: int, eps: float, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._size = size  # patches along a square's side
        self._eps = eps
        self._arrays = arrays
        self._weights = weights
        self._piece = piece

    def merge(self, features: Array, columns: int) -> Work:
        """Merges features [patches, features] in rows of `columns`: returns [squares, features]. Yields as Tower
        does."""
        normed = self._arrays.rms_norm(features, self._weights["norm.weight"], self._eps)
        grid = normed.reshape(-1, self._size, columns // self._size, self._size, features.shape[1])
        squares = grid.swapaxes(1, 2).swapaxes(2, 4).swapaxes(3, 4)  # the numbers of a feature come before its place
        return (yield from product(self._arrays, squares.reshape(-1, self._matrix.columns), self._matrix, self._piece))

    @property
    def _matrix(self) -> Matrix:
        matrix: Matrix = self._weights["weight"]
        return matrix


def averaged(grid: Array, size: int) -> Array:
    """Returns the average of each square of size x size features: [rows, columns, features] -> [squares, features]."""
    rows, columns = grid.shape[0] // size, grid.shape[1] // size
    squares = grid.reshape(rows, size, columns, size, grid.shape[2])
    total = reduce(add, (squares[:, row, :, column] for row in range(size) for column in range(size)))
    return (total * (1 / size**2)).reshape(rows * columns, -1)


def with_tiles(arrays: Arrays, tiles: Array, layout: Layout, newline: Array) -> Array:
    """Joins the projected features of a picture's tiles: [1 + tiles, features, hidden_size] -> [tokens, hidden_size].

    The whole picture comes first, then its rows, each followed by `newline`.
    """
    whole, hidden = tiles[0], tiles.shape[-1]
    side = math.isqrt(tiles.shape[1])
    rows = tiles[1:].reshape(layout.rows, layout.columns, side, side, hidden)
    large = rows.swapaxes(1, 2).reshape(layout.rows * side, layout.columns * side, hidden)
    kept = large[layout.top : layout.top + layout.height, layout.left : layout.left + layout.width]
    if (layout.new_height, layout.new_width) != (layout.height, layout.width):
        taps = linear_taps(layout.height, layout.new_height), linear_taps(layout.width, layout.new_width)
        kept = resampled(arrays, kept, *taps)
    height, width = layout.new_height, layout.new_width
    lines = arrays.empty(height, width + 1, hidden)
    lines[:, :width] = kept
    lines[:, width] = newline
    return arrays.concat([whole, lines.reshape(-1, hidden)])


def of_frames(arrays: Arrays, frames: Array, pooled: tuple[int, int], newline: Array) -> Array:
    """Joins the projected features of a video: [frames, features, hidden_size] -> [tokens, hidden_size].

    Each frame is resampled to pooled[0] x pooled[1] features; one `newline` ends the video.
    """
    side, hidden = math.isqrt(frames.shape[1]), frames.shape[-1]
    down, across = (linear_taps(side, size) for size in pooled)
    small = resampled(arrays, frames.reshape(-1, side, side, hidden), down, across)
    return arrays.concat([small.reshape(-1, hidden), newline.reshape(1, -1)])
