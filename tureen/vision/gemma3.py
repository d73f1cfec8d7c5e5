"""The part of Gemma 3 that sees: turns pictures into embeddings of the language model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from tureen.errors import RequestFailed
from tureen.media.gemma3 import Gemma3Vision
from tureen.vision.picture_embedder import Work
from tureen.vision.tower import MIN_ROWS, Tower, blocks


class Gemma3Embedder:
    """A tower, two norms, and a matrix that projects averages of features. weights: those of `Gemma3Vision.weights`;
    piece: see Tower."""

    def __init__(self, vision: Gemma3Vision, weights: Mapping[str, Tensor], piece: int) -> None:
        self._vision = vision
        of_tower = {name.removeprefix("tower."): weight for name, weight in weights.items()}
        self._tower = Tower(vision.tower, of_tower, piece)
        self._norm = weights["norm.weight"], weights["norm.bias"]
        self._projector_norm = weights["projector_norm"] + 1  # stored minus 1
        self._projector = weights["projector"].T.contiguous()
        self._piece = piece

    def embed(self, pictures: Tensor, layout: tuple[int, ...]) -> Work:
        """Embeds a picture [1, 3, height, width], normalised: returns [tokens, hidden_size]. Yields as Tower does.

        Raises RequestFailed for other pictures, before anything is computed.
        """
        size, tower = self._vision.tower.image_size, self._vision.tower
        if pictures.shape != (1, 3, size, size) or layout:
            raise RequestFailed(f"the model takes pictures of {size} x {size} pixels only")
        features = yield from self._tower.states(pictures[0], (tower.num_layers,))
        normed = functional.layer_norm(features, features.shape[-1:], *self._norm, tower.norm_eps)
        averages = averaged(normed, self._vision.pooled)
        averages = functional.rms_norm(averages, averages.shape[-1:], self._projector_norm, tower.norm_eps)
        embeddings = features.new_empty(len(averages), len(self._projector))
        row_flops = 2 * self._projector.numel()
        for rows in blocks(len(averages), row_flops, self._piece, MIN_ROWS):
            embeddings[rows] = functional.linear(averages[rows], self._projector)
            yield len(averages[rows]) * row_flops
        return embeddings


def averaged(features: Tensor, pooled: int) -> Tensor:
    """Returns the average of each square of pooled x pooled features, row by row. features: [patches, size], those of a
    square picture."""
    side = round(len(features) ** 0.5)
    grid = features.reshape(side // pooled, pooled, side // pooled, pooled, -1)
    return grid.mean(dim=(1, 3)).reshape((side // pooled) ** 2, -1)


def make(vision: Gemma3Vision, weights: Mapping[str, Tensor], piece: int) -> Gemma3Embedder:
    """Makes the PictureEmbedder of a Gemma 3."""
    return Gemma3Embedder(vision, weights, piece)
