"""The part of Idefics3 and SmolVLM that sees: turns pictures into embeddings of the language model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tureen.errors import RequestFailed
from tureen.media.idefics3_vision import Idefics3Vision
from tureen.vision.picture_embedder import Work
from tureen.vision.tower import MIN_ROWS, Tower, blocks


class Idefics3Embedder:
    """A tower, a norm, and a matrix that projects squares of features. weights: those of `Idefics3Vision.weights`;
    piece: see Tower."""

    def __init__(self, vision: Idefics3Vision, weights: Mapping[str, Tensor], piece: int) -> None:
        self._vision = vision
        of_tower = {name.removeprefix("tower."): weight for name, weight in weights.items()}
        of_tower["positions"] = in_buckets(of_tower["positions"], vision.tower.image_size // vision.tower.patch_size)
        self._tower = Tower(vision.tower, of_tower, piece)
        self._norm = weights["norm.weight"], weights["norm.bias"]
        self._projector = weights["projector.weight"]
        self._piece = piece

    def embed(self, pictures: Tensor, layout: tuple[int, ...]) -> Work:
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
        return torch.cat(embedded)

    def _project(self, features: Tensor) -> Work:
        normed = functional.layer_norm(features, features.shape[-1:], *self._norm, self._vision.tower.norm_eps)
        squares = in_squares(normed, self._vision.scale)
        embeddings = features.new_empty(len(squares), len(self._projector))
        row_flops = 2 * self._projector.numel()
        for rows in blocks(len(squares), row_flops, self._piece, MIN_ROWS):
            embeddings[rows] = functional.linear(squares[rows], self._projector)
            yield len(squares[rows]) * row_flops
        return embeddings


def in_squares(features: Tensor, scale: int) -> Tensor:
    """Joins the features of each square of scale x scale patches: [patches, size] -> [squares, scale * scale * size].

    The patches are those of a square tile, row by row, and so are the squares and the patches in each.
    """
    side = round(len(features) ** 0.5)
    grid = features.reshape(side // scale, scale, side // scale, scale, -1)
    return grid.transpose(1, 2).reshape((side // scale) ** 2, -1)


def in_buckets(positions: Tensor, side: int) -> Tensor:
    """Returns the embedding of each patch's position in a tile of side x side patches.

    The models look positions up by fractions of the tile's side, in float32. In sides such as 25 and 29, some fractions
    are rounded to below their own bucket, so these patches have the position before theirs.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    buckets = torch.bucketize(fractions.clamp(max=1 - 1e-6), bounds, right=True).to(positions.device)
    return positions.reshape(side, side, -1)[buckets][:, buckets].reshape(positions.shape)


def make(vision: Idefics3Vision, weights: Mapping[str, Tensor], piece: int) -> Idefics3Embedder:
    """Makes the PictureEmbedder of an Idefics3 or SmolVLM."""
    return Idefics3Embedder(vision, weights, piece)
