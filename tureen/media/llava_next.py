"""LLaVA-NeXT, also called 1.6: a picture is shown whole, then larger in tiles, with a newline after each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tureen.media import tiles
from tureen.media.base import Modality, PicturePart, Prepared
from tureen.media.resizing import FILE, PictureSettings, picture_settings
from tureen.media.settings import Settings
from tureen.media.vision_config import CLIP_LARGE, VisionConfig, parse_vision, tile_side

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("llava_next",)
GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNext:
    """The Family of LLaVA-NeXT."""

    placeholder = "<image>"
    around = ""
    inner_id: int | None = None
    video_placeholder = None
    video_placeholder_id = None
    part_tokens = ()

    def __init__(
        self, placeholder_id: int | None, side: int, grid: tuple[tiles.Size, ...], settings: PictureSettings
    ) -> None:
        self.placeholder_id = placeholder_id
        self._side = side  # features along a tile's
        self._grid = grid
        self._settings = settings
        self.normalisation = settings.normalisation

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [self._prepared(picture) for picture in pictures]

    def _prepared(self, picture: Image) -> Prepared:
        size = (picture.height, picture.width)
        target = tiles.best_resolution(size, self._grid)
        layout = tiles.plan(size, target, self._settings.output_size[0], self._side)
        pixels = tiles.cut(picture, target, self._settings)
        return Prepared(pixels, self._side**2 + layout.num_tokens, layout)

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        return (PicturePart(prepared.num_tokens),)


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> LlavaNext:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    config, vision = Settings("config.json", hf), vision_config(hf)
    size = vision.tower.image_size
    settings = picture_settings(preprocessor, "LlavaNextImageProcessor")
    if settings.output_size != (size, size):
        raise Settings(FILE, preprocessor).fault("crop_size", f"must be the tower's image_size, {size}")
    grid = tiles.resolutions(config, GRID, size)
    if tiles.resolutions(Settings(FILE, preprocessor), [list(pair) for pair in grid], size) != grid:
        raise Settings(FILE, preprocessor).fault("image_grid_pinpoints", "must be that of config.json")
    return LlavaNext(config.token_id("image_token_index", 32000), tile_side(vision), grid, settings)


def vision_config(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision encoder's description from config.json. Raises StartupError naming the key at fault."""
    return parse_vision(hf, CLIP_LARGE, layer=-2, strategy="default", has_newline=True)
