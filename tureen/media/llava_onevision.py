"""LLaVA-OneVision (arXiv:2408.03326): one picture in tiles, several as one tile each, or the frames of a video."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tureen.errors import echo
from tureen.media import tiles
from tureen.media.base import Modality, PicturePart, Prepared
from tureen.media.resizing import FILE, PictureSettings, fit, pad_to_square, picture_settings
from tureen.media.settings import Settings
from tureen.media.vision_config import VisionConfig, parse_vision, tile_side

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("llava_onevision",)
SIDES = range(384, 2305, 384)
GRID = [[height, width] for height in SIDES for width in SIDES]
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
"""SigLIP-SO400M (arXiv:2303.15343): the tower of a config that names none."""
MAX_TILES = re.compile(r"anyres_max_([1-9]\d{0,3})")
NEWLINE = 1  # tokens


class LlavaOnevision:
    """The Family of LLaVA-OneVision."""

    placeholder = "<image>"
    around = ""
    inner_id: int | None = None
    video_placeholder = "<video>"
    part_tokens = ()

    def __init__(
        self, config: Settings, side: int, grid: tuple[tiles.Size, ...], max_tiles: int, settings: PictureSettings
    ) -> None:
        self.placeholder_id = config.token_id("image_token_index", 151646)
        self.video_placeholder_id = config.token_id("video_token_index", 151647)
        self._side = side  # features along a tile's
        self._grid = grid
        self._max_tiles = max_tiles
        self._settings = settings
        self.normalisation = settings.normalisation

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        if modality == "image":
            return [self._in_tiles(picture) for picture in pictures]
        if modality == "multi-images":
            return [self._whole(picture) for picture in pictures]
        pooled = -(-self._side // 2)
        frames = np.stack([fit(picture, self._settings) for picture in pictures])
        return [Prepared(frames, len(frames) * pooled**2 + NEWLINE, (pooled, pooled))]

    def _in_tiles(self, picture: Image) -> Prepared:
        size = (picture.height, picture.width)
        target = tiles.best_resolution(size, self._grid)
        layout = tiles.plan(size, target, self._settings.output_size[0], self._side, self._max_tiles)
        pixels = tiles.cut(picture, target, self._settings)
        return Prepared(pixels, self._side**2 + layout.num_tokens, layout)

    def _whole(self, picture: Image) -> Prepared:
        square = pad_to_square(picture, self._settings.background)
        return Prepared(fit(square, self._settings)[None], self._side**2 + NEWLINE)

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        return (PicturePart(prepared.num_tokens),)


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> LlavaOnevision:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    config, vision = Settings("config.json", hf), vision_config(hf)
    size = vision.tower.image_size
    settings = picture_settings(preprocessor, "LlavaOnevisionImageProcessor")
    if settings.output_size != (size, size):
        raise Settings(FILE, preprocessor).fault("size", f"must be the tower's image_size, {size}")
    grid = tiles.resolutions(config, GRID, size)
    if tiles.resolutions(Settings(FILE, preprocessor), [list(pair) for pair in grid], size) != grid:
        raise Settings(FILE, preprocessor).fault("image_grid_pinpoints", "must be that of config.json")
    ratio = config.get("vision_aspect_ratio", "anyres_max_9")
    match = MAX_TILES.fullmatch(ratio) if isinstance(ratio, str) else None
    if match is None:
        raise config.fault("vision_aspect_ratio", f"must be anyres_max_ and a number, got {echo(ratio)}")
    return LlavaOnevision(config, tile_side(vision), grid, int(match[1]), settings)


def vision_config(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision encoder's description from config.json. Raises StartupError naming the key at fault."""
    return parse_vision(hf, SIGLIP, layer=-1, strategy="full", has_newline=True)
