"""Cuts pictures of any resolution into tiles of one size, as LLaVA-NeXT does (its authors' code chooses and counts them
so)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import echo
from tureen.media.resizing import PictureSettings, fit, padded, resize
from tureen.media.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Height and width."""

ENOUGH_LARGER = 1.1  # features along a side, to those that are wanted: below it they are left as they are


class Layout(NamedTuple):
    """How the features of a picture's tiles become its tokens. All numbers but the first two count features.

    The first tile is the whole picture. The others are rows of a larger one; of their features those of the picture
    itself are kept, without its edges, and resampled if they are too many.
    """

    rows: int  # of tiles
    columns: int
    top: int  # where what is kept begins
    left: int
    height: int  # of what is kept
    width: int
    new_height: int  # that it is resampled to
    new_width: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the tiles after the first; each row has one more at its end."""
        return self.new_height * (self.new_width + 1)


def resolutions(config: Settings, default: list[list[int]], tile: int) -> tuple[Size, ...]:
    """Reads `image_grid_pinpoints`: sizes in pixels, each of whole tiles. Raises StartupError.

    tile: pixels along a tile's side.
    """
    grid = config.get("image_grid_pinpoints", default)
    if not isinstance(grid, list) or not grid:
        raise config.fault("image_grid_pinpoints", f"must be a list of [height, width], got {echo(grid)}")
    for size in grid:
        pair = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
        if not pair or size[0] % tile or size[1] % tile:
            raise config.fault(
                "image_grid_pinpoints",
                f"must be [height, width] in whole tiles of {tile} pixels, got {echo(str(size))}",
            )
    return tuple((height, width) for height, width in grid)


def best_resolution(size: Size, among: tuple[Size, ...]) -> Size:
    """Returns the size of `among` that shows most of the picture and, of those, wastes the least."""
    height, width = size

    def shown_and_wasted(target: Size) -> tuple[int, int]:
        scale = min(target[1] / width, target[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - target[0] * target[1]

    return max(among, key=shown_and_wasted)


def cut(picture: Image, target: Size, settings: PictureSettings) -> NDArray[np.uint8]:
    """Cuts a picture: uint8 [1 + tiles, height, width, 3].

    The first tile is the whole picture; the others show it at the target's resolution, row by row.
    """
    height, width = settings.output_size
    whole = resize(picture, settings.size or (settings.short_side or height,) * 2, settings)
    large = padded(resize(picture, _inside(picture, target), settings), target)
    corners = [(left, top) for top in range(0, target[0], height) for left in range(0, target[1], width)]
    tiles = [large.crop((left, top, left + width, top + height)) for left, top in corners]
    return np.stack([fit(tile, settings) for tile in (whole, *tiles)])


def plan(size: Size, target: Size, tile: int, side: int, max_tiles: int | None = None) -> Layout:
    """Computes a picture's layout.

    size: the picture's, in pixels; target: that of `best_resolution`; tile: pixels along a tile's side; side: features
    along one. max_tiles: a picture with more features than these tiles have is resampled.
    """
    rows, columns = target[0] // tile, target[1] // tile
    height, width = rows * side, columns * side
    top = left = 0
    if size[1] / size[0] > width / height:
        top = (height - int(round(size[0] * (width / size[1]), 7))) // 2
    else:
        left = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    height, width = height - 2 * top, width - 2 * left
    new_height, new_width = height, width
    if max_tiles is not None:
        ratio = math.sqrt(height * width / (max_tiles * side**2))
        if ratio > ENOUGH_LARGER:
            new_height, new_width = int(height // ratio), int(width // ratio)
    return Layout(rows, columns, top, left, height, width, new_height, new_width)


def _inside(picture: Image, target: Size) -> Size:
    """Returns the picture's size once it is as large as fits into the target."""
    by_height, by_width = target[0] / picture.height, target[1] / picture.width
    if by_width < by_height:
        return min(math.ceil(picture.height * by_width), target[0]), target[1]
    return target[0], min(math.ceil(picture.width * by_height), target[1])
