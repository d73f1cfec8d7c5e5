"""Pictures for Pixtral's tower (arXiv:2410.07073): any shape, in rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tureen.errors import RequestFailed
from tureen.media.base import Modality, Normalisation, PicturePart, Prepared
from tureen.media.resizing import BICUBIC, CLIP_MEAN, CLIP_STD, FILE, normalisation, processor, resampling_filter
from tureen.media.settings import Settings
from tureen.media.vision_config import VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_EDGE = 1024  # of a file that gives no size
ROW_END, END = "[IMG_BREAK]", "[IMG_END]"


class Pixtral:
    """The Family of models with Pixtral's tower."""

    placeholder = "[IMG]"
    around = ""
    inner_id: int | None = None
    video_placeholder: str | None = None
    video_placeholder_id: int | None = None
    part_tokens: tuple[str, ...] = (ROW_END, END)

    def __init__(
        self,
        placeholder_id: int | None,
        vision: VisionConfig,
        limit: tuple[int, int],
        resample: int,
        values: Normalisation,
    ) -> None:
        self.placeholder_id = placeholder_id
        self.normalisation = values
        self._vision = vision
        self._limit = limit  # most pixels of height and width
        self._resample = resample

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [self._prepared(picture) for picture in pictures]

    def _prepared(self, picture: Image) -> Prepared:
        height, width = target_size((picture.height, picture.width), self._limit, self._vision.unit)
        pixels = np.asarray(picture.resize((width, height), self._resample))
        return Prepared(pixels[None], self._vision.num_features(height, width))

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        count, height, width, _ = prepared.pixels.shape
        rows, columns = height // self._vision.unit, width // self._vision.unit
        fits = count == 1 and not prepared.layout and self._vision.takes(height, width)
        if not fits or prepared.num_tokens != rows * columns:
            raise RequestFailed("a picture could not be decoded: its process sent an invalid answer")
        row = PicturePart(columns, ROW_END)
        return (PicturePart(columns), *[row] * (rows - 1), PicturePart(0, END))


def target_size(size: tuple[int, int], limit: tuple[int, int], unit: int) -> tuple[int, int]:
    """Returns the height and width that a picture of `size` is resized to: within `limit` in proportion, then up to
    whole units."""
    ratio = max(side / most for side, most in zip(size, limit, strict=True))
    within = [max(1, int(side / ratio)) if ratio > 1 else side for side in size]
    height, width = (-(-side // unit) * unit for side in within)
    return height, width


def parse_pixtral(hf: Mapping[str, Any], vision: VisionConfig, preprocessor: Mapping[str, Any]) -> Pixtral:
    """Reads both configs; preprocessor: {} if the folder has none. Raises StartupError naming the key at fault."""
    config, settings = Settings("config.json", hf), Settings(FILE, preprocessor)
    processor(settings, ("PixtralImageProcessor",))
    for key, value in (("do_resize", True), ("do_center_crop", False)):
        if settings.flag(key, value) != value:
            raise settings.fault(key, f"{str(not value).lower()} is not supported by this model")
    _check_patch(settings, vision)
    limit, most = _limit(settings, LONGEST_EDGE if preprocessor else vision.tower.image_size), vision.tower.image_size
    if max(limit) > most:
        raise settings.fault("size", f"must be at most the tower's image_size, {most}")
    key = "image_token_index" if config.has("image_token_index") else "image_token_id"
    values = normalisation(settings, CLIP_MEAN, CLIP_STD)
    return Pixtral(config.token_id(key, 10), vision, limit, resampling_filter(settings, BICUBIC), values)


def _check_patch(settings: Settings, vision: VisionConfig) -> None:
    """Raises StartupError for patches of another size than the tower's; the file may give that of merged ones."""
    size = settings.get("patch_size", vision.tower.patch_size)
    sides = size if isinstance(size, Mapping) else {"height": size, "width": size}
    allowed = [{"height": side, "width": side} for side in (vision.tower.patch_size, vision.unit)]
    if sides not in allowed:
        raise settings.fault("patch_size", f"must be the tower's, {vision.tower.patch_size}")


def _limit(settings: Settings, default: int) -> tuple[int, int]:
    """Returns the most pixels of height and width."""
    value = settings.get("size", {"longest_edge": default})
    if not isinstance(value, Mapping):
        side = settings.integer("size")
        return side, side
    size = Settings(f"{FILE}: size", value)
    keys = {key for key in value if size.get(key) is not None}
    if keys == {"longest_edge"}:
        return size.integer("longest_edge"), size.integer("longest_edge")
    if keys == {"height", "width"}:
        return size.integer("height"), size.integer("width")
    raise settings.fault("size", "must give longest_edge, or height and width")
