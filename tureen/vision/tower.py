"""Computes a vision transformer's hidden states, piece by piece: CLIP, SigLIP, DINOv2 and Pixtral differ in a few
flags.

A piece is some rows of a product, or some heads and queries; the generators yield the floating-point operations of each
piece after it is done. How a picture is divided depends on the model and `piece` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tureen.media.vision_config import TowerConfig
from tureen.vision.arrays import Array, Arrays, Matrix, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.resampling import cubic_taps, resampled

Turns = tuple[Array, Array]
MIN_ROWS: Final = 256  # of a product: fewer spend their time on reading the matrix


class Tower:
    """A vision transformer (arXiv:2010.11929).

    weights: those of `TowerConfig.weights`; piece: floating-point operations that may be done at once, about.
    """

    def __init__(self, config: TowerConfig, arrays: Arrays, weights: Weights, piece: int) -> None:
        self.config = config
        self._arrays = arrays
        self._weights = weights
        self._piece = piece

    def states(self, pixels: Array, layers: tuple[int, ...]) -> Work:
        """Returns the outputs of these layers, side by side, for pixels [3, height, width], normalised: [tokens,
        hidden_size * len(layers)]. Layer 0 is the input of the first. Yields the operations of each piece."""
        hidden = yield from self._embed(pixels)
        turns = self._turns(pixels)
        size, width = hidden.shape
        features = self._arrays.empty(size, len(layers), width)
        for layer in range(self.config.num_layers + 1):
            if layer > 0:
                yield from self._run_layer(hidden, f"layers.{layer - 1}", turns)
            for place in (place for place, number in enumerate(layers) if number == layer):
                features[:, place] = hidden
        return features.reshape(size, -1)

    def _embed(self, pixels: Array) -> Work:
        config, weights, arrays = self.config, self._weights, self._arrays
        patches = cut(pixels, config.patch_size)
        kernel: Matrix = weights["patches.weight"]
        inputs = patches.reshape(-1, kernel.columns)
        hidden = yield from product(arrays, inputs, kernel, self._piece, weights.get("patches.bias"))
        if config.has_class_token:
            hidden = arrays.concat([weights["class_token"].reshape(1, -1), hidden])
        if config.rope_theta is None:
            hidden += self._positions(pixels.shape[1], pixels.shape[2])
        if config.has_input_norm:
            hidden = self._norm(hidden, "input_norm")
        return hidden

    def _positions(self, height: int, width: int) -> Array:
        positions: Array = self._weights["positions"]
        size, patch = self.config.image_size, self.config.patch_size
        if height == width and self.config.num_patches(height, width) == self.config.num_patches(size, size):
            return positions
        first, side = int(self.config.has_class_token), size // patch
        square = positions[first:].reshape(side, side, -1)
        taps = cubic_taps(side, height // patch), cubic_taps(side, width // patch)
        stretched = resampled(self._arrays, square, *taps)
        return self._arrays.concat([positions[:first], stretched.reshape(-1, positions.shape[1])])

    def _turns(self, pixels: Array) -> Turns | None:
        """Returns the cosines and sines, [tokens, head_dim / 2] each, of the angles by which positions rotate pairs."""
        config = self.config
        if config.rope_theta is None:
            return None
        rows, columns = pixels.shape[1] // config.patch_size, pixels.shape[2] // config.patch_size
        size = config.hidden_size // config.num_heads
        steps = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        frequencies = 1 / np.float32(config.rope_theta) ** steps
        places = np.arange(max(rows, columns), dtype=np.float32)[:, None]
        angles = np.empty((rows, columns, size // 2), np.float32)
        angles[:, :, : size // 4] = (places[:rows] * frequencies[0::2])[:, None]
        angles[:, :, size // 4 :] = places[:columns] * frequencies[1::2]
        flat = angles.reshape(rows * columns, -1)
        return self._arrays.constant(np.cos(flat)), self._arrays.constant(np.sin(flat))

    def _run_layer(self, hidden: Array, name: str, turns: Turns | None) -> Iterator[int]:
        """Adds to `hidden` in place."""
        mixed = yield from self._attend(hidden, name, turns)
        names = ("out", "fc1", "fc2", "gate") if self.config.has_gate else ("out", "fc1", "fc2")
        row_flops = sum(self._weights[f"{name}.{part}.weight"].flops for part in names)
        for rows in blocks(len(hidden), row_flops, self._piece, MIN_ROWS):
            part = hidden[rows]
            part += self._scaled(self._linear(mixed[rows], f"{name}.out"), f"{name}.scale1")
            inner = self._inner(self._norm(part, f"{name}.norm2"), name)
            part += self._scaled(self._linear(inner, f"{name}.fc2"), f"{name}.scale2")
            yield len(part) * row_flops

    def _inner(self, normed: Array, name: str) -> Array:
        """Returns the mlp's inner values."""
        arrays, activation = self._arrays, self.config.activation
        inner = self._linear(normed, f"{name}.fc1")
        if self.config.has_gate:
            return arrays.activate(self._linear(normed, f"{name}.gate"), activation) * inner
        if self.config.has_gated_mlp:
            half = inner.shape[1] // 2
            return arrays.activate(inner[:, :half], activation) * inner[:, half:]
        return arrays.activate(inner, activation)

    def _attend(self, hidden: Array, name: str, turns: Turns | None) -> Work:
        """Attends, every token to every other: returns [tokens, hidden_size], the heads side by side."""
        size, width = hidden.shape
        num_heads = self.config.num_heads
        projected = self._arrays.empty(3, size, num_heads, width // num_heads)
        row_flops = 6 * width * width
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            normed = self._norm(hidden[rows], f"{name}.norm1")
            for out, part in zip(projected, "qkv", strict=True):
                out[rows] = self._linear(normed, f"{name}.{part}").reshape(len(normed), num_heads, -1)
                if turns is not None and part != "v":
                    self._arrays.rotate(out[rows], turns[0][rows], turns[1][rows])
            yield len(normed) * row_flops
        q, k, v = projected
        return (yield from attend(self._arrays, q, k, v, self._piece))

    def _linear(self, x: Array, name: str) -> Array:
        return self._arrays.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Array, name: str) -> Array:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        if self.config.has_rms_norms:
            return self._arrays.rms_norm(x, weight, self.config.norm_eps)
        return self._arrays.layer_norm(x, weight, bias, self.config.norm_eps)

    def _scaled(self, x: Array, name: str) -> Array:
        return x * self._weights[name] if self.config.has_layer_scales else x


def cut(pixels: Array, patch: int) -> Array:
    """Cuts pixels [3, height, width] into patches: [rows, columns, 3, patch, patch]. Pixels beyond whole patches are
    left out."""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    grid = pixels[:, : rows * patch, : columns * patch].reshape(-1, rows, patch, columns, patch)
    return grid.swapaxes(0, 1).swapaxes(1, 3).swapaxes(2, 3)


def attend(
    arrays: Arrays,
    q: Array,
    k: Array,
    v: Array,
    piece: int,
    *,
    spans: Sequence[slice] = (slice(None),),
    scale: float | None = None,
) -> Work:
    """Attends, the tokens of a span to each other; all are [tokens, heads, head_dim]. Returns [tokens, heads *
    head_dim]. Yields as Tower does.

    A head that is more than a piece is divided by queries. scale: of scores; None: 1 / sqrt(head_dim).
    """
    mixed = arrays.empty(*q.shape)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for span in spans:
        yield from _attend_span(arrays, mixed[span], (q[span], k[span], v[span]), piece, scale)
    return mixed.reshape(len(mixed), -1)


def _attend_span(
    arrays: Arrays, mixed: Array, qkv: tuple[Array, Array, Array], piece: int, scale: float
) -> Iterator[int]:
    q, k, v = qkv
    size, num_heads, width = q.shape
    query_flops = 4 * size * width
    for heads in blocks(num_heads, query_flops * size, piece, 1):
        seen = arrays.seen(k[:, heads], v[:, heads])
        head_flops = (heads.stop - heads.start) * query_flops
        for rows in blocks(size, head_flops, piece, MIN_ROWS):
            arrays.attend(mixed[rows, heads], q[rows, heads], seen, scale)
            yield (rows.stop - rows.start) * head_flops


def product(arrays: Arrays, x: Array, matrix: Matrix, piece: int, bias: Array | None = None) -> Work:
    """Multiplies rows piece by piece. Yields as Tower does."""
    products = arrays.empty(len(x), matrix.rows)
    for rows in blocks(len(x), matrix.flops, piece, MIN_ROWS):
        products[rows] = arrays.linear(x[rows], matrix, bias)
        yield (rows.stop - rows.start) * matrix.flops
    return products


def blocks(count: int, flops: int, piece: int, least: int) -> Iterator[slice]:
    """Yields `count` rows of `flops` operations each, in blocks of about a piece, but of no fewer rows than `least`."""
    rows = max(least, piece // max(1, flops))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))
