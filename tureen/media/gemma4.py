"""Gemma 4: a picture keeps its proportions, within a number of tokens, each the average of a square of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tureen.errors import RequestFailed
from tureen.media.base import Modality, Normalisation, PicturePart, Prepared
from tureen.media.gemma4_vision import MOST_TOKENS, Gemma4Vision, parse_vision
from tureen.media.resizing import BICUBIC, FILE, normalisation, processor, processor_settings, resampling_filter
from tureen.media.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("gemma4",)
VISION_IS_OPTIONAL = ("gemma4",)
"""Models that take text only where config.json has no vision_config."""
PROCESSORS: Final = ("Gemma4ImageProcessor",)
START, IMAGE, END = "<|image>", "<|image|>", "<image|>"
ZEROS, ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


class Gemma4:
    """The Family of Gemma 4."""

    placeholder = IMAGE
    around = ""
    inner_id: int | None = None
    video_placeholder: str | None = None
    video_placeholder_id: int | None = None
    part_tokens = (START, END)

    def __init__(self, hf: Mapping[str, Any], vision: Gemma4Vision, settings: Settings) -> None:
        """settings: preprocessor_config.json. Raises StartupError naming the key at fault."""
        config = Settings("config.json", hf)
        self.placeholder_id = config.token_id("image_token_id", 258880)
        self.normalisation = _normalisation(settings)
        self._is_whole = config.part("text_config").get("use_bidirectional_attention") == "vision"
        self._side = vision.token_side
        self._most_tokens = _most_tokens(settings, vision)
        self._resample = resampling_filter(settings, BICUBIC)

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [self._prepared(picture) for picture in pictures]

    def _prepared(self, picture: Image) -> Prepared:
        rows, columns = grid_of((picture.height, picture.width), self._side, self._most_tokens)
        size = columns * self._side, rows * self._side
        shown = picture if picture.size == size else picture.resize(size, self._resample)
        return Prepared(np.asarray(shown)[None], rows * columns)

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        tiles, height, width, _ = prepared.pixels.shape
        num_tokens, rest = divmod(height * width, self._side**2)
        if tiles != 1 or rest or prepared.num_tokens != num_tokens or num_tokens > self._most_tokens:
            raise RequestFailed(f"{prepared.num_tokens} tokens are not those of a picture of {height} x {width} pixels")
        return (PicturePart(num_tokens, START, is_whole=self._is_whole), PicturePart(0, END))


def grid_of(size: tuple[int, int], side: int, most_tokens: int) -> tuple[int, int]:
    """Returns the rows and columns of a picture's tokens: about its proportions, as many as are allowed.

    size: height and width in pixels; side: that of a token.
    """
    factor = math.sqrt(most_tokens * side**2 / (size[0] * size[1]))
    rows, columns = (math.floor(factor * length / side) for length in size)
    if rows == 0:
        return 1, min(size[1] // size[0], most_tokens)
    if columns == 0:
        return min(size[0] // size[1], most_tokens), 1
    return rows, columns


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma4:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    settings = processor_settings(preprocessor)
    processor(settings, PROCESSORS)
    return Gemma4(hf, parse_vision(hf), settings)


def _most_tokens(settings: Settings, vision: Gemma4Vision) -> int:
    most, pooled = settings.integer("max_soft_tokens", 280), vision.pooled
    if most not in MOST_TOKENS:
        raise settings.fault("max_soft_tokens", f"{most} is not one of {', '.join(map(str, MOST_TOKENS))}")
    if not settings.flag("do_resize", True):
        raise settings.fault("do_resize", "must be true: the tower takes no picture of any size")
    for key, own in (("patch_size", vision.patch_size), ("pooling_kernel_size", pooled)):
        if settings.integer(key, own) != own:
            raise settings.fault(key, f"must be that of config.json's vision_config, {own}")
    if most * pooled > vision.num_positions:
        raise Settings(FILE, {}).fault(
            "max_soft_tokens", f"{most * pooled} patches in a row have no place: the tower knows {vision.num_positions}"
        )
    return most


def _normalisation(settings: Settings) -> Normalisation:
    """Returns the file's normalisation, after which the tower takes 0 … 1 to -1 … 1."""
    own = normalisation(settings, ZEROS, ONES) if settings.flag("do_normalize", False) else None
    scale = settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0
    means, stds = (own.mean, own.std) if own else (ZEROS, ONES)
    middles = tuple(mean + std / 2 for mean, std in zip(means, stds, strict=True))
    return Normalisation(scale, middles, tuple(std / 2 for std in stds))
