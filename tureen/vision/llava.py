"""The vision encoder of the LLaVAs, Pixtral and Mistral 3: turns pictures into embeddings of the language model."""

from __future__ import annotations

from tureen.errors import RequestFailed
from tureen.media.tiles import Layout
from tureen.media.vision_config import VisionConfig
from tureen.vision.arrays import Array, Arrays, Weights
from tureen.vision.picture_embedder import Work
from tureen.vision.projector import Merger, Projector, of_frames, with_tiles
from tureen.vision.tower import Tower

NO_LAYOUT, POOLED, TILED = 0, 2, len(Layout._fields)
"""Lengths of the layouts of a picture in one tile, of a video, and of a picture in tiles; see media/llava*.py."""


class LlavaVision:
    """A tower, for some models a merger, and a projector. weights: those of `VisionConfig.weights`; piece: see
    Tower."""

    def __init__(self, config: VisionConfig, arrays: Arrays, weights: Weights, piece: int) -> None:
        self._config = config
        self._arrays = arrays
        self._tower = Tower(config.tower, arrays, _under("tower.", weights), piece)
        self._projector = Projector(config.projector_activation, arrays, _under("projector.", weights), piece)
        self._newline = weights.get("newline")
        self._merger = None
        if config.merger_eps is not None:
            self._merger = Merger(config.merge_size, config.merger_eps, arrays, _under("merger.", weights), piece)

    def embed(self, pictures: Array, layout: tuple[int, ...]) -> Work:
        """Embeds pictures [tiles, 3, height, width], normalised: returns [tokens, hidden_size]. Yields as Tower does.

        Raises RequestFailed when the layout is not that of such tiles, before anything is computed.
        """
        self._check(pictures, layout)
        embedded = []
        for picture in pictures:
            features = yield from self._tower.states(picture, self._config.feature_layers)
            features = features[1:] if self._config.drops_first else features
            if self._merger is not None:
                features = yield from self._merger.merge(features, picture.shape[2] // self._config.tower.patch_size)
            embedded.append((yield from self._projector.project(features)))
        return self._joined(embedded, layout)

    def _joined(self, embedded: list[Array], layout: tuple[int, ...]) -> Array:
        if self._newline is None:
            return embedded[0]
        size, hidden = embedded[0].shape
        joined = self._arrays.concat(embedded)
        if len(layout) == TILED:
            return with_tiles(self._arrays, joined.reshape(-1, size, hidden), Layout(*layout), self._newline)
        if len(layout) == POOLED:
            pooled = layout[0], layout[1]
            return of_frames(self._arrays, joined.reshape(-1, size, hidden), pooled, self._newline)
        return self._arrays.concat([joined, self._newline.reshape(1, -1)])

    def _check(self, pictures: Array, layout: tuple[int, ...]) -> None:
        count, _, height, width = pictures.shape
        tower = self._config.tower
        fits = self._config.takes(height, width)
        side = tower.image_size // tower.patch_size
        if len(layout) == TILED:
            fits &= self._newline is not None and count > 1 and _is_possible(Layout(*layout), count - 1, side)
        elif len(layout) == POOLED:
            fits &= self._newline is not None and all(0 < size <= side for size in layout)
        else:
            fits &= len(layout) == NO_LAYOUT and count == 1
        if not fits:
            raise RequestFailed(f"the model does not take {count} tiles of {height} x {width} pixels laid out so")


def _is_possible(layout: Layout, count: int, side: int) -> bool:
    """Returns whether a layout lies within its tiles."""
    inside = (
        layout.rows * layout.columns == count
        and 0 <= layout.top <= layout.top + layout.height <= layout.rows * side
        and 0 <= layout.left <= layout.left + layout.width <= layout.columns * side
    )
    return inside and 0 <= layout.new_height <= layout.height and 0 <= layout.new_width <= layout.width


def make(vision: VisionConfig, arrays: Arrays, weights: Weights, piece: int) -> LlavaVision:
    """Makes the PictureEmbedder of a LLaVA."""
    return LlavaVision(vision, arrays, weights, piece)


def _under(prefix: str, weights: Weights) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
