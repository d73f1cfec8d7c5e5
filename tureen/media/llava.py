"""LLaVA-1.5 (arXiv:2310.03744): a picture is one tile of a fixed size. With Pixtral's tower it is a Pixtral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tureen.media.base import Family, Modality, PicturePart, Prepared
from tureen.media.pixtral import parse_pixtral
from tureen.media.resizing import FILE, PictureSettings, fit, picture_settings
from tureen.media.settings import Settings
from tureen.media.vision_config import CLIP_LARGE, KINDS, PIXTRAL, VisionConfig, parse_vision

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("llava",)
PROCESSORS = ("CLIPImageProcessor", "SiglipImageProcessor", "BitImageProcessor", "LlavaImageProcessor")


class Llava:
    """The Family of LLaVA-1.5."""

    placeholder = "<image>"
    around = ""
    inner_id: int | None = None
    video_placeholder: str | None = None
    video_placeholder_id: int | None = None
    part_tokens: tuple[str, ...] = ()

    def __init__(self, placeholder_id: int | None, vision: VisionConfig, settings: PictureSettings) -> None:
        self.placeholder_id = placeholder_id
        self._settings = settings
        self.normalisation = settings.normalisation
        self._num_tokens = vision.num_features(*settings.output_size)

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [Prepared(fit(picture, self._settings)[None], self._num_tokens) for picture in pictures]

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        return (PicturePart(prepared.num_tokens),)


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Family:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    config, vision = Settings("config.json", hf), vision_config(hf)
    if vision.tower.rope_theta is not None:
        return parse_pixtral(hf, vision, preprocessor)
    settings = picture_settings(preprocessor, *PROCESSORS)
    size = vision.tower.image_size
    if not vision.tower.stretches and settings.output_size != (size, size):
        raise Settings(FILE, preprocessor).fault("size", f"must make pictures of the encoder's size: {size} x {size}")
    return Llava(config.token_id("image_token_index", 32000), vision, settings)


def vision_config(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision encoder's description from config.json. Raises StartupError naming the key at fault."""
    kinds = (*KINDS, PIXTRAL)
    return parse_vision(hf, CLIP_LARGE, layer=-2, strategy="default", has_newline=False, kinds=kinds)
