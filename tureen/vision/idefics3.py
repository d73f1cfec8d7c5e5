"""the vision encoder of Idefics3 and SmolVLM: turns pictures into embeddings of the language model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tureen.errors import RequestFailed
from tureen.media.idefics3_vision import Idefics3Vision
from tureen.vision.arrays import Array, Arrays, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.tower import Tower, product


class Idefics3Embedder:
    """A tower, a norm, and a matrix that projects squares of features. weights: those of `Idefics3Vision.weights`;
    piece: see Tower."""

    def __init__(self, vision: Idefics3Vision, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._vision = vision
        self._arrays = arrays
        of_tower = {name.removeprefix("tower."): weight for name, weight in weights.items()}
        side = vision.tower.image_size // vision.tower.patch_size
        of_tower["positions"] = of_tower["positions"][arrays.constant(in_buckets(side))]
        self._tower = Tower(vision.tower, arrays, of_tower, piece)
        self._norm = weights["norm.weight"], weights["norm.bias"]
        self._projector = weights["projector.weight"]
        self._piece = piece

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds pictures [tiles, 3, height, width], normalised: returns [tokens, hidden_size]. Yields as Tower does.

        Raises RequestFailed when the layout is not that of such tiles, before anything is computed.
        """
        count, _, height, width = pictures.shape
        if not self._vision.is_possible((count, height, width), layout):
            raise RequestFailed(f"the model does not take {count} tiles of {height} x {width} pixels laid out so")
        embedded = []
        for picture in pictures:
            features = yield from self._tower.states(picture, (self._vision.tower.num_layers,))
            embedded.append((yield from self._project(features)))
        return self._arrays.concat(embedded)

    def _project(self, features: Array) -> Work:
        normed = self._arrays.layer_norm(features, *self._norm, self._vision.tower.norm_eps)
        squares = in_squares(normed, self._vision.scale)
        return (yield from product(self._arrays, squares, self._projector, self._piece))


def in_squares(features: Array, scale: int) -> Array:
    """Joins the features of each square of scale x scale patches: [patches, size] -> [squares, scale * scale * size].

    The patches are those of a square tile, row by row, and so are the squares and the patches in each.
    """
    side = round(len(features) ** 0.5)
    grid = features.reshape(side // scale, scale, side // scale, scale, -1)
    return grid.swapaxes(1, 2).reshape((side // scale) ** 2, -1)


def in_buckets(side: int) -> NDArray[np.int64]:
    """Returns the number of the position that each patch of a tile of side x side patches has.

    The models look positions up by fractions of the tile's side, in float32. In sides such as 25 and 29, some fractions
    are rounded to below their own bucket, so these patches have the position before theirs.
    """
    fractions = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    buckets = np.searchsorted(_bounds(side), fractions.clip(max=np.float32(1 - 1e-6)), side="right")
    return (buckets[:, None] * side + buckets).reshape(-1)


def _bounds(side: int) -> NDArray[np.float32]:
    """Returns where buckets end, as torch.arange(1 / side, 1, 1 / side) has them on a CPU: of each sixteen numbers, it
    rounds the first and the ninth to float32 before it adds to them."""
    step = 1 / side
    numbers = np.arange(np.ceil((1 - step) / step))
    bounds = step + step * numbers
    whole = len(bounds) // 16 * 16
    bounds[:whole] = bounds[:whole:8].astype(np.float32).repeat(8) + step * (numbers[:whole] % 8)
    return bounds.astype(np.float32)


def make(vision: Idefics3Vision, arrays: Arrays, weights: Weights, piece: int) -> Idefics3Embedder:
    """Makes the PictureEmbedder of an Idefics3 or SmolVLM."""
    return Idefics3Embedder(vision, arrays, weights, piece)
