"""Brings pictures to the size that a vision tower takes, as the image processors of Hugging Face's models do it.

A preprocessor_config.json names one of them, whose defaults hold for what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import echo
from tureen.media.base import Normalisation
from tureen.media.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

Channels = tuple[float, ...]
"""A number for each of R, G and B."""

FILE = "preprocessor_config.json"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
NUM_FILTERS = 6  # Pillow's
CROPPING = {
    "size": {"shortest_edge": 224},
    "crop_size": 224,
    "do_center_crop": True,
    "mean": CLIP_MEAN,
    "std": CLIP_STD,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": CROPPING,
    "BitImageProcessor": CROPPING,
    "LlavaImageProcessor": CROPPING,
    "LlavaNextImageProcessor": CROPPING,
    "SiglipImageProcessor": {"size": 224, "do_center_crop": False, "mean": HALF, "std": HALF},
    "Gemma3ImageProcessor": {"size": 224, "do_center_crop": False, "mean": HALF, "std": HALF, "resample": BILINEAR},
    "LlavaOnevisionImageProcessor": {"size": 384, "do_center_crop": False, "mean": CLIP_MEAN, "std": CLIP_STD},
}
"""Their defaults. A single number stands for a square."""
OLD_NAMES = {"CLIPFeatureExtractor": "CLIPImageProcessor"}


class PictureSettings(NamedTuple):
    """How pictures become tiles of one size."""

    size: tuple[int, int] | None  # height, width that they are stretched to
    short_side: int | None  # or that their short side gets, in proportion
    crop: tuple[int, int] | None  # height, width of what is then cut from the middle
    resample: int  # a filter of Pillow's
    pads_to_square: bool  # first, with the mean
    normalisation: Normalisation

    @property
    def output_size(self) -> tuple[int, int]:
        """The height and width of the tiles. Raises StartupError when they differ from picture to picture."""
        size = self.crop or self.size
        if size is None:
            raise Settings(FILE, {}).fault(
                "do_center_crop", "must be true where the size is a shortest_edge: pictures of any shape are not taken"
            )
        return size

    @property
    def background(self) -> tuple[int, ...]:
        """The colour, R, G and B in 0 … 255, that pictures are padded with: the mean."""
        return tuple(int(value * 255) for value in self.normalisation.mean)


def picture_settings(preprocessor: Mapping[str, Any], *known: str) -> PictureSettings:
    """Reads preprocessor_config.json. Raises StartupError naming the key at fault.

    known: the names of PROCESSORS that the family goes with; the first holds where the file names none.
    """
    settings = processor_settings(preprocessor)
    name = processor(settings, known)
    defaults = PROCESSORS[name]
    size = _size(settings, "size", defaults) if settings.flag("do_resize", True) else {}
    crops = settings.flag("do_center_crop", defaults["do_center_crop"])
    return PictureSettings(
        size=(size["height"], size["width"]) if "height" in size else None,
        short_side=size.get("shortest_edge"),
        crop=tuple(_size(settings, "crop_size", defaults).values()) if crops else None,  # type: ignore[arg-type]
        resample=resampling_filter(settings, defaults.get("resample", BICUBIC)),
        pads_to_square=name == "LlavaImageProcessor" and settings.flag("do_pad", False),
        normalisation=normalisation(settings, defaults["mean"], defaults["std"]),
    )


def resampling_filter(settings: Settings, default: int) -> int:
    """Reads which filter of Pillow preprocessor_config.json resizes with. Raises StartupError."""
    resample = settings.get("resample", default)
    if type(resample) is not int or not 0 <= resample < NUM_FILTERS:
        raise settings.fault("resample", f"must be a filter of Pillow, 0 to {NUM_FILTERS - 1}, got {echo(resample)}")
    return resample


def normalisation(settings: Settings, mean: Channels, std: Channels) -> Normalisation:
    """Returns the normalisation; mean and std are the defaults. Raises StartupError."""
    normalises = settings.flag("do_normalize", True)
    return Normalisation(
        scale=settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0,
        mean=_channels(settings, "image_mean", mean) if normalises else (0.0, 0.0, 0.0),
        std=_channels(settings, "image_std", std) if normalises else (1.0, 1.0, 1.0),
    )


def fit(picture: Image, settings: PictureSettings) -> NDArray[np.uint8]:
    """Resizes and crops a picture: uint8 [height, width, 3] of `settings.output_size`."""
    if settings.pads_to_square:
        picture = pad_to_square(picture, settings.background)
    if settings.short_side is not None:
        picture = resize(picture, _in_proportion(picture, settings.short_side), settings)
    elif settings.size is not None:
        picture = resize(picture, settings.size, settings)
    pixels: NDArray[np.uint8] = np.asarray(picture)
    return pixels if settings.crop is None else _middle(pixels, settings.crop)


def resize(picture: Image, size: tuple[int, int], settings: PictureSettings) -> Image:
    """Resizes a picture to `size`: height, width."""
    return picture.resize(size[::-1], settings.resample)


def pad_to_square(picture: Image, background: tuple[int, ...]) -> Image:
    """Pads a picture's shorter side on both ends, to a square."""
    side = max(picture.size)
    return padded(picture, (side, side), background)


def padded(picture: Image, size: tuple[int, int], background: tuple[int, ...] = (0, 0, 0)) -> Image:
    """Puts the picture in the middle of a larger one of `size`: height, width."""
    height, width = size
    left, top = (width - picture.width) // 2, (height - picture.height) // 2
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = background
    pixels[top : top + picture.height, left : left + picture.width] = np.asarray(picture)
    return _from_pixels(pixels)


def _from_pixels(pixels: NDArray[np.uint8]) -> Image:
    from PIL import Image  # noqa: PLC0415 - the server's front reads settings without it

    return Image.fromarray(pixels)


def _in_proportion(picture: Image, short_side: int) -> tuple[int, int]:
    short, long = sorted(picture.size)
    long_side = int(short_side * long / short)
    return (long_side, short_side) if picture.width <= picture.height else (short_side, long_side)


def _middle(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Crops the middle; missing edges become black."""
    height, width = size
    missing = [max(0, target - actual) for target, actual in zip(size, pixels.shape, strict=False)]
    if any(missing):
        edges = [(-(-count // 2), count // 2) for count in missing]
        pixels = np.pad(pixels, (*edges, (0, 0)))
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def processor_settings(preprocessor: Mapping[str, Any]) -> Settings:
    """Returns preprocessor_config.json to be read. Raises StartupError if the folder has none."""
    settings = Settings(FILE, preprocessor)
    if not preprocessor:
        raise settings.fault(
            "image_processor_type",
            "is missing: pictures need this file; download it again, or serve text with --language-model-only",
        )
    return settings


def processor(settings: Settings, known: tuple[str, ...]) -> str:
    """Returns the name of the image processor: one of `known`, the first if the file names none. Raises StartupError.

    Older files call it a feature extractor; suffixes tell its speed.
    """
    declared = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or known[0])
    name = OLD_NAMES.get(declared, declared).removesuffix("Fast").removesuffix("Pil")
    if name not in known:
        raise settings.fault(
            "image_processor_type", f"{echo(declared)} is not supported by this model; known: {', '.join(known)}"
        )
    return name


def _size(settings: Settings, key: str, defaults: Mapping[str, Any]) -> dict[str, int]:
    """Reads {height, width} or {shortest_edge}. A number is a square, or the shortest edge where that is the
    default."""
    value = settings.get(key, defaults.get(key))
    if type(value) is int:
        is_edge = key == "size" and not isinstance(defaults["size"], int)
        value = {"shortest_edge": value} if is_edge else {"height": value, "width": value}
    if isinstance(value, Mapping):
        keys = {name for name, number in value.items() if number is not None}
        for size_keys in (("height", "width"), ("shortest_edge",)):
            if keys == set(size_keys) and (len(size_keys) == 2 or key == "size"):
                part = Settings(f"{FILE}: {key}", value)
                return {name: part.integer(name) for name in size_keys}
    raise settings.fault(key, "must give height and width" + (", or shortest_edge" if key == "size" else ""))


def _channels(settings: Settings, key: str, default: Channels) -> Channels:
    values = settings.get(key, default)
    if (
        not isinstance(values, (list, tuple))
        or len(values) != 3
        or not all(isinstance(v, (int, float)) for v in values)
    ):
        raise settings.fault(key, f"must be a list of 3 numbers, got {echo(values)}")
    if key == "image_std" and not all(value > 0 for value in values):
        raise settings.fault(key, "must be numbers above 0")
    return tuple(float(value) for value in values)
