"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6 (arXiv:2409.12191): a picture of any resolution has a token for each
square of a few patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tureen.errors import RequestFailed
from tureen.media.base import Modality, Normalisation, PicturePart, Prepared
from tureen.media.qwen_vision import QwenVision, qwen2_5_vision, qwen2_vision, qwen3_vision
from tureen.media.resizing import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    normalisation,
    processor,
    processor_settings,
    resampling_filter,
)
from tureen.media.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
VISION_IS_OPTIONAL = ("qwen3_5", "qwen3_5_moe")
"""Models that take text only where config.json has no vision_config."""
DEEP_TYPES = ("qwen3_vl", "qwen3_vl_moe")
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""Limits of a picture's size where preprocessor_config.json names none."""


class QwenPictures:
    """The Family of Qwen's models that see."""

    placeholder = "<|image_pad|>"
    around = ""
    inner_id: int | None = None
    video_placeholder = None
    video_placeholder_id = None
    part_tokens = ()

    def __init__(
        self,
        placeholder_id: int | None,
        side: int,
        limits: tuple[int, int],
        resample: int,
        normalisation: Normalisation,
    ) -> None:
        """side: pixels along the square that becomes one token; limits: the least and the most pixels of a picture."""
        self.placeholder_id = placeholder_id
        self.normalisation = normalisation
        self._side = side
        self._limits = limits
        self._resample = resample

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [self._prepared(picture) for picture in pictures]

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        count, *size, _ = prepared.pixels.shape
        if count != 1 or any(pixels % self._side for pixels in size):
            raise RequestFailed(f"a picture was prepared as {count} x {size}, not in squares of {self._side} pixels")
        rows, columns = (pixels // self._side for pixels in size)
        return (PicturePart(rows * columns, grid=(rows, columns)),)

    def _prepared(self, picture: Image) -> Prepared:
        height, width = whole_tokens(picture.height, picture.width, self._side, self._limits)
        pixels = np.asarray(picture.resize((width, height), self._resample))
        return Prepared(pixels[None], height * width // self._side**2)


def whole_tokens(height: int, width: int, side: int, limits: tuple[int, int]) -> tuple[int, int]:
    """Returns the height and width in pixels that a picture is resized to: multiples of `side` near its own, whose
    product is within the limits (arXiv:2409.12191, section 2.1, as the authors' code rounds)."""
    least, most = limits
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrunk = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(pixels / shrunk / side)) for pixels in (height, width))
    elif rows * columns * side**2 < least:
        grown = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(pixels * grown / side) for pixels in (height, width))
    return rows * side, columns * side


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> QwenPictures:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    vision, settings = vision_config(hf), processor_settings(preprocessor)
    processor(settings, PROCESSORS)
    own = {"patch_size": vision.patch_size, "merge_size": vision.merge, "temporal_patch_size": vision.num_frames}
    for key, value in own.items():
        if settings.integer(key, value) != value:
            raise settings.fault(key, f"must be that of config.json, {value}, got {settings.get(key)}")
    if not settings.flag("do_resize", True):
        raise settings.fault(
            "do_resize", f"must be true: sides of pictures become multiples of {vision.token_side} pixels"
        )
    return QwenPictures(
        Settings("config.json", hf).token_id("image_token_id", 151655),
        vision.token_side,
        _limits(settings, vision.token_side),
        resampling_filter(settings, BICUBIC),
        normalisation(settings, CLIP_MEAN, CLIP_STD),
    )


def vision_config(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision encoder's description from config.json. Raises StartupError naming the key at fault."""
    if hf.get("model_type") == "qwen2_vl":
        return qwen2_vision(hf)
    if hf.get("model_type") == "qwen2_5_vl":
        return qwen2_5_vision(hf)
    return qwen3_vision(hf, is_deep=hf.get("model_type") in DEEP_TYPES)


def _limits(settings: Settings, side: int) -> tuple[int, int]:
    """Reads the least and the most pixels of a picture. Older files do not have them in `size`."""
    size = settings.part("size")
    least = settings.integer("min_pixels", size.integer("shortest_edge", LEAST_PIXELS))
    most = settings.integer("max_pixels", size.integer("longest_edge", MOST_PIXELS))
    if most < side**2 or least > most:
        key = "max_pixels" if settings.has("max_pixels") else "size"
        raise settings.fault(key, f"must allow pictures of {side**2} pixels, one token; it allows {least} to {most}")
    return least, most
