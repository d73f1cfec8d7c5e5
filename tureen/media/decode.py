"""Decodes a picture's bytes to RGB. Runs in a process of its own: see decode_worker.py."""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageFile

from tureen.media.truncation import is_whole

MAX_PIXELS = 64 << 20
MAX_SIDE = 32_768
MAX_RATIO = 200
"""The largest ratio of the longer side to the shorter one: families enlarge the shorter one to hundreds of pixels."""

DAMAGED = "is damaged or incomplete"
ORIENTATION = 0x0112  # EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
UNREADABLE = (SyntaxError, ValueError, TypeError, LookupError, EOFError, struct.error)
"""Exceptions that Pillow raises for broken metadata."""

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
"""Pillow looks too, wherever it allocates something of a picture's size."""


class Refused(Exception):
    """A picture is not taken; the message is for the client."""


def kind_of(data: bytes) -> str | None:
    """Returns Pillow's name of the format that the data begins as; None = none of those taken."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "WEBP" if data.startswith(b"RIFF") and data[8:12] == b"WEBP" else None


def decode(data: bytes) -> Image.Image:
    """Decodes the first frame: RGB, the right way up, on white where it is transparent. Raises Refused, MemoryError."""
    image = open_picture(data)
    with pillow_may_fail():
        picture = to_rgb(image)
    turn = TURNS.get(_orientation(image))
    return picture if turn is None else picture.transpose(turn)


def open_picture(data: bytes) -> ImageFile.ImageFile:
    """Opens a picture: reads its header, and checks its size. Raises Refused, MemoryError."""
    kind = kind_of(data)
    if kind is None:
        raise Refused("is not a PNG, JPEG, WEBP or GIF file")
    with pillow_may_fail():
        image = Image.open(io.BytesIO(data), formats=[kind])
    check_size(*image.size)
    if not is_whole(kind, data):
        raise Refused(DAMAGED)
    return image


def check_size(width: int, height: int) -> None:
    """Raises Refused for a size in pixels that is not taken."""
    short, long = sorted((width, height))
    if short < 1 or long > MAX_SIDE:
        raise Refused(f"has {width} x {height} pixels; a side may have 1 to {MAX_SIDE}")
    if width * height > MAX_PIXELS:
        raise Refused(f"has {width} x {height} pixels; it may have {MAX_PIXELS} in all: make it smaller")
    if long > MAX_RATIO * short:
        raise Refused(f"has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other")


def reduced(picture: Image.Image, max_pixels: int) -> Image.Image:
    """Returns the picture, in proportion with about `max_pixels` if it has more."""
    scale = math.sqrt(max_pixels / (picture.width * picture.height))
    if scale >= 1:
        return picture
    size = max(1, int(picture.width * scale)), max(1, int(picture.height * scale))
    return picture.resize(size, Image.Resampling.LANCZOS)


@contextlib.contextmanager
def pillow_may_fail() -> Iterator[None]:
    """Turns whatever Pillow raises for a client's bytes, but for want of memory, into Refused."""
    try:
        yield
    except (Refused, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise Refused(f"has more than {MAX_PIXELS} pixels: make it smaller") from None
    except Exception:  # noqa: BLE001 - its decoders raise dozens of kinds, with words and addresses in them
        raise Refused(DAMAGED) from None


def to_rgb(image: ImageFile.ImageFile) -> Image.Image:
    """Converts the frame that the picture is at to RGB, as a copy. Raises whatever Pillow raises."""
    _fit_transparency(image)
    image.load()
    if image.mode == "I;16":
        return _from_16_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    drawn = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(drawn, (0, 0), drawn)
    return white


def _fit_transparency(image: ImageFile.ImageFile) -> None:
    """Scales a PNG's transparent colour to 8 bits. Pillow does so with the samples, but leaves this colour as the file
    has it."""
    stored, colour = image.tile[0].args if image.tile else None, image.info.get("transparency")
    if stored == "L;2" and isinstance(colour, int):
        image.info["transparency"] = colour % 4 * 85
    elif stored == "L;4" and isinstance(colour, int):
        image.info["transparency"] = colour % 16 * 17
    elif stored == "RGB;16B" and isinstance(colour, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Converts a grey picture: takes the upper 8 bits, as Pillow does of colours. Its own conversion makes nearly
    everything white."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")


def _orientation(image: Image.Image) -> int:
    orientation = 1
    with contextlib.suppress(*UNREADABLE):
        orientation = image.getexif().get(ORIENTATION, 1)
    return orientation if isinstance(orientation, int) else 1
