"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): a picture is shown in square tiles, then whole.

The text names each tile's row and column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import RequestFailed, echo
from tureen.media.base import Modality, Normalisation, PicturePart, Prepared
from tureen.media.idefics3_vision import Idefics3Vision, parse_vision
from tureen.media.resizing import HALF, LANCZOS, normalisation, processor, processor_settings, resampling_filter
from tureen.media.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("idefics3", "smolvlm")
PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
LONGEST = 4096
"""The most pixels that a side has before the picture is divided, if its size is given by the longest edge."""

Size = tuple[int, int]
"""Height and width, in pixels."""


class TileSettings(NamedTuple):
    """How a picture becomes tiles. Without `long_side` and `size` it first keeps its own size."""

    long_side: int | None  # that it is resized to, in proportion
    size: Size | None  # or that it is stretched to
    splits: bool  # False: the picture is one tile
    side: int  # of a tile
    resample: int  # a filter of Pillow's
    normalisation: Normalisation


class Idefics3:
    """The Family of Idefics3 and SmolVLM. The layout of a picture is its rows and columns; 0, 0 if it is one tile."""

    placeholder = "<image>"
    around = ""
    inner_id: int | None = None
    video_placeholder = None
    video_placeholder_id = None
    part_tokens = (AROUND,)

    def __init__(self, placeholder_id: int | None, vision: Idefics3Vision, settings: TileSettings) -> None:
        self.placeholder_id = placeholder_id
        self.normalisation = settings.normalisation
        self._vision = vision
        self._settings = settings

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [self._prepared(picture) for picture in pictures]

    def _prepared(self, picture: Image) -> Prepared:
        settings = self._settings
        if settings.long_side is not None:
            picture = self._resized(picture, with_long_side((picture.height, picture.width), settings.long_side))
        elif settings.size is not None:
            picture = self._resized(picture, settings.size)
        whole = (settings.side, settings.side)
        target = divisible((picture.height, picture.width), settings.side) if settings.splits else whole
        picture = self._resized(picture, target)
        if target == whole:
            return Prepared(np.asarray(picture)[None], self._vision.num_tokens, (0, 0))
        last = np.asarray(self._resized(picture, whole))[None]
        tiles = np.concatenate([_cut(np.asarray(picture), settings.side), last])
        layout = (target[0] // settings.side, target[1] // settings.side)
        return Prepared(tiles, len(tiles) * self._vision.num_tokens, layout)

    def _resized(self, picture: Image, size: Size) -> Image:
        return picture.resize(size[::-1], self._settings.resample)

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        tiles, layout, tokens = len(prepared.pixels), prepared.layout, self._vision.num_tokens
        if prepared.num_tokens != tiles * tokens or not self._vision.is_possible(prepared.pixels.shape[:3], layout):
            raise RequestFailed(f"a picture of {tiles} tiles cannot be laid out in {echo(layout)}")
        rows, columns = layout
        parts = [
            PicturePart(tokens, f"{_newline(row, column)}{AROUND}<row_{row + 1}_col_{column + 1}>")
            for row in range(rows)
            for column in range(columns)
        ]
        return (*parts, PicturePart(tokens, ("\n\n" if parts else "") + AROUND + WHOLE), PicturePart(0, AROUND))


def _newline(row: int, column: int) -> str:
    """Returns the text that ends the row before a tile."""
    return "\n" if row > 0 and column == 0 else ""


def _cut(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Cuts pixels [height, width, 3] into tiles [tiles, side, side, 3], row by row."""
    height, width, channels = pixels.shape
    rows = pixels.reshape(height // side, side, width // side, side, channels)
    return rows.swapaxes(1, 2).reshape(-1, side, side, channels)


def with_long_side(size: Size, long_side: int) -> Size:
    """Returns a size in proportion, the short side even. Sides of more than LONGEST pixels become smaller."""
    height, width = _in_proportion(size, long_side)
    if size[1] >= size[0]:
        height += height % 2
    else:
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > LONGEST:
        height, width = _in_proportion((height, width), LONGEST)
    return max(height, 1), max(width, 1)


def divisible(size: Size, side: int) -> Size:
    """Returns the size of whole tiles that a picture is enlarged to: first its long side, then the other one."""
    height, width = _in_proportion(size, _multiple(max(size), side))
    return _multiple(height, side), _multiple(width, side)


def _in_proportion(size: Size, long_side: int) -> Size:
    height, width = size
    ratio = width / height
    return (int(long_side / ratio), long_side) if width >= height else (long_side, int(long_side * ratio))


def _multiple(length: int, side: int) -> int:
    return -(-length // side) * side


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Idefics3:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    config, vision = Settings("config.json", hf), parse_vision(hf)
    return Idefics3(config.token_id("image_token_id", 128257), vision, _settings(preprocessor, vision.tower.image_size))


def _settings(preprocessor: Mapping[str, Any], side: int) -> TileSettings:
    settings = processor_settings(preprocessor)
    processor(settings, PROCESSORS)
    if settings.part("max_image_size").integer("longest_edge", 364) != side:
        raise settings.fault("max_image_size", f"must have the tower's image_size as its longest_edge, {side}")
    size = _size(settings) if settings.flag("do_resize", True) else {}
    return TileSettings(
        long_side=size.get("longest_edge"),
        size=(size["height"], size["width"]) if "height" in size else None,
        splits=settings.flag("do_image_splitting", True),
        side=side,
        resample=resampling_filter(settings, LANCZOS),
        normalisation=normalisation(settings, HALF, HALF),
    )


def _size(settings: Settings) -> dict[str, int]:
    """Reads {longest_edge} or {height, width}."""
    value = settings.get("size", {"longest_edge": 4 * 364})
    keys = {key for key, number in value.items() if number is not None} if isinstance(value, Mapping) else None
    if keys not in ({"longest_edge"}, {"height", "width"}):
        raise settings.fault("size", f"must give longest_edge, or height and width, got {echo(value)}")
    part = settings.part("size")
    return {key: part.integer(key, value[key]) for key in keys}
