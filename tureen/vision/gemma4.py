"""The vision encoder of Gemma 4: turns pictures of any proportions into embeddings of the language model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tureen.errors import RequestFailed
from tureen.media.gemma4_vision import BOUNDS, Gemma4Vision
from tureen.vision.arrays import Array, Arrays, Matrix, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.projector import averaged
from tureen.vision.tower import MIN_ROWS, attend, blocks, cut, product

Turns = tuple[tuple[Array, Array], tuple[Array, Array]]
"""Cosines and sines, [patches, head_dim / 4], of the angles that turn a head's first half, and its second."""


class Gemma4Embedder:
    """The PictureEmbedder of Gemma 4. weights: those of `Gemma4Vision.weights`; piece: see Tower."""

    def __init__(self, config: Gemma4Vision, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._config = config
        self._arrays = arrays
        self._weights = weights
        self._piece = piece
        self._bounds = _bounds(weights)

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds one picture [1, 3, height, width], normalised: returns [tokens, hidden_size]. Yields as Tower does.

        Raises RequestFailed for other pictures, before anything is computed.
        """
        config, arrays = self._config, self._arrays
        count, _, height, width = pictures.shape
        rows, columns = height // config.patch_size, width // config.patch_size
        fits = (
            height % config.token_side == width % config.token_side == 0 and max(rows, columns) <= config.num_positions
        )
        if layout or count != 1 or not fits:
            raise RequestFailed(f"the model does not take {count} tiles of {height} x {width} pixels laid out so")
        hidden = yield from self._embed_patches(pictures[0], rows, columns)
        places = np.arange(rows * columns)
        turns = self._turns(places % columns), self._turns(places // columns)
        for layer in range(config.num_layers):
            yield from self._run_layer(hidden, f"layers.{layer}", turns)
        wide = arrays.widened(hidden).reshape(rows, columns, -1)  # narrow numbers lose what std_bias leaves of them
        features = averaged(wide, config.pooled) * config.hidden_size**0.5
        if config.is_standardised:
            bias, scale = (arrays.widened(self._weights[name]) for name in ("std_bias", "std_scale"))
            features = (features - bias) * scale
        normed = self._norm(arrays.narrowed(features), self._ones(config.hidden_size))
        return (yield from product(arrays, normed, self._weights["projector.weight"], self._piece))

    def _embed_patches(self, pixels: Array, rows: int, columns: int) -> Work:
        arrays, kernel = self._arrays, self._weights["patches.weight"]
        patches = cut(pixels, self._config.patch_size).swapaxes(2, 3).swapaxes(3, 4)  # colours come last
        hidden = yield from product(arrays, patches.reshape(-1, kernel.columns), kernel, self._piece)
        places = np.arange(rows * columns)
        across, down = self._weights["positions"]
        hidden += across[arrays.constant(places % columns)]
        hidden += down[arrays.constant(places // columns)]
        return hidden

    def _turns(self, places: NDArray[np.int64]) -> tuple[Array, Array]:
        """Returns cosines and sines, [places, head_dim / 4] each, of the angles by which places turn pairs."""
        half = self._config.head_dim // 2
        steps = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
        angles = places.astype(np.float32)[:, None] / np.float32(self._config.rope_theta) ** steps
        return self._arrays.constant(np.cos(angles)), self._arrays.constant(np.sin(angles))

    def _run_layer(self, hidden: Array, name: str, turns: Turns) -> Iterator[int]:
        """Adds to `hidden` in place."""
        weights, mixed = self._weights, (yield from self._attend(hidden, name, turns))
        row_flops = sum(self._matrix(f"{name}.{part}").flops for part in ("out", "gate", "up", "down"))
        for rows in blocks(len(hidden), row_flops, self._piece, MIN_ROWS):
            part = hidden[rows]
            part += self._norm(self._linear(mixed[rows], f"{name}.out"), weights[f"{name}.norm2"])
            normed = self._norm(part, weights[f"{name}.norm3"])
            inner = self._arrays.activate(self._linear(normed, f"{name}.gate"), self._config.activation)
            inner *= self._linear(normed, f"{name}.up")
            part += self._norm(self._linear(inner, f"{name}.down"), weights[f"{name}.norm4"])
            yield len(part) * row_flops

    def _attend(self, hidden: Array, name: str, turns: Turns) -> Work:
        """Attends, every patch to every other: returns [patches, heads * head_dim]."""
        config, weights, size = self._config, self._weights, len(hidden)
        heads, dim = config.num_heads, config.head_dim
        projected = self._arrays.empty(3, size, heads, dim)
        norms = weights[f"{name}.q_norm"], weights[f"{name}.k_norm"], self._ones(dim)
        row_flops = 3 * self._matrix(f"{name}.q").flops
        for rows in blocks(size, row_flops, self._piece, MIN_ROWS):
            normed = self._norm(hidden[rows], weights[f"{name}.norm1"])
            for out, part, norm in zip(projected, "qkv", norms, strict=True):
                flat = self._linear(normed, f"{name}.{part}").reshape(-1, dim)
                out[rows] = self._norm(flat, norm).reshape(len(normed), heads, dim)
                if part != "v":
                    self._turn(out[rows], rows, turns)
            yield len(normed) * row_flops
        q, k, v = projected
        return (yield from attend(self._arrays, q, k, v, self._piece, scale=1.0))

    def _turn(self, x: Array, rows: slice, turns: Turns) -> None:
        """Turns x [patches, heads, head_dim] in place: a head's first half by columns, its second by rows."""
        half = self._config.head_dim // 2
        for part, (cos, sin) in zip((x[:, :, :half], x[:, :, half:]), turns, strict=True):
            self._arrays.rotate(part, cos[rows], sin[rows])

    def _linear(self, x: Array, name: str) -> Array:
        if name not in self._bounds:
            return self._arrays.linear(x, self._matrix(name))
        bounds = self._bounds[name]
        return self._arrays.linear(x.clip(*bounds[:2]), self._matrix(name)).clip(*bounds[2:])

    def _matrix(self, name: str) -> Matrix:
        matrix: Matrix = self._weights[f"{name}.weight"]
        return matrix

    def _norm(self, x: Array, weight: Array) -> Array:
        return self._arrays.rms_norm(x, weight, self._config.norm_eps)

    def _ones(self, size: int) -> Array:
        return self._arrays.narrowed(self._arrays.constant(np.ones(size, np.float32)))


def make(vision: Gemma4Vision, arrays: Arrays, weights: Weights, piece: int) -> Gemma4Embedder:
    """Makes the PictureEmbedder of a Gemma 4."""
    return Gemma4Embedder(vision, arrays, weights, piece)


def _bounds(weights: Weights) -> dict[str, tuple[float, ...]]:
    """Returns the bounds of each product that has any, by its name."""
    names = (name.removesuffix(f".{BOUNDS[0]}") for name in weights if name.endswith(BOUNDS[0]))
    return {name: tuple(float(weights[f"{name}.{bound}"]) for bound in BOUNDS) for name in names}
