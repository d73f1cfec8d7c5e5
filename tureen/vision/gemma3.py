"""The vision encoder of Gemma 3: turns pictures into embeddings of the language model."""

from __future__ import annotations

from tureen.errors import RequestFailed
from tureen.media.gemma3 import Gemma3Vision
from tureen.vision.arrays import Array, Arrays, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.projector import averaged
from tureen.vision.tower import Tower, product


class Gemma3Embedder:
    """A tower, two norms, and a matrix that projects averages of features. weights: those of `Gemma3Vision.weights`;
    piece: see Tower."""

    def __init__(self, vision: Gemma3Vision, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._vision = vision
        self._arrays = arrays
        of_tower = {name.removeprefix("tower."): weight for name, weight in weights.items()}
        self._tower = Tower(vision.tower, arrays, of_tower, piece)
        self._norm = weights["norm.weight"], weights["norm.bias"]
        self._projector_norm = arrays.widened(weights["projector_norm"]) + 1  # stored minus 1
        self._projector = arrays.matrix(weights["projector"].swapaxes(0, 1))
        self._piece = piece

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds a picture [1, 3, height, width], normalised: returns [tokens, hidden_size]. Yields as Tower does.

        Raises RequestFailed for other pictures, before anything is computed.
        """
        tower = self._vision.tower
        size, side = tower.image_size, tower.image_size // tower.patch_size
        if tuple(pictures.shape) != (1, 3, size, size) or layout:
            raise RequestFailed(f"the model takes pictures of {size} x {size} pixels only")
        features = yield from self._tower.states(pictures[0], (tower.num_layers,))
        normed = self._arrays.layer_norm(features, *self._norm, tower.norm_eps)
        averages = averaged(self._arrays.widened(normed).reshape(side, side, -1), self._vision.pooled)
        inputs = self._arrays.narrowed(self._arrays.rms_norm(averages, self._projector_norm, tower.norm_eps))
        return (yield from product(self._arrays, inputs, self._projector, self._piece))


def make(vision: Gemma3Vision, arrays: Arrays, weights: Weights, piece: int) -> Gemma3Embedder:
    """Makes the PictureEmbedder of a Gemma 3."""
    return Gemma3Embedder(vision, arrays, weights, piece)
