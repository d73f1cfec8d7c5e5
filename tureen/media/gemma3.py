"""Gemma 3 (arXiv:2503.19786): a picture is stretched to the tower's square; squares of its features are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from tureen.errors import RequestFailed
from tureen.media import llava_names
from tureen.media.base import Modality, PicturePart, Prepared
from tureen.media.resizing import FILE, PictureSettings, fit, picture_settings
from tureen.media.settings import Settings
from tureen.media.vision_config import TowerConfig, parse_tower

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_TYPES = ("gemma3",)
VISION_IS_OPTIONAL = ("gemma3",)
"""Models that take text only where config.json has no vision_config."""
PROCESSOR: Final = "Gemma3ImageProcessor"
START, END = "<start_of_image>", "<end_of_image>"
NAMES: Final = {
    "multi_modal_projector.mm_input_projection_weight": "projector",
    "multi_modal_projector.mm_soft_emb_norm.weight": "projector_norm",
    "post_layernorm.weight": "norm.weight",
    "post_layernorm.bias": "norm.bias",
}
"""Names of weights in checkpoints -> those used here. The tower's are LLaVA's."""


class Gemma3Vision(msgspec.Struct, frozen=True, kw_only=True):
    """The description of SigLIP's tower, and of the matrix that makes embeddings of averaged features."""

    module: ClassVar[str] = "tureen.vision.gemma3"

    tower: TowerConfig
    pooled: int  # features along a side of the square that is averaged

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a picture."""
        return (self.tower.image_size // self.tower.patch_size // self.pooled) ** 2

    def weights(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all weights by the names used here; hidden_size: the language model's."""
        shapes = {f"tower.{name}": shape for name, shape in self.tower.weights().items()}
        size = self.tower.hidden_size
        norms = {"norm.weight": (size,), "norm.bias": (size,), "projector_norm": (size,)}
        return shapes | norms | {"projector": (size, hidden_size)}

    def local_name(self, name: str) -> str | None:
        """Returns the name used here of a checkpoint's weight; None for one that is not used. Raises KeyError."""
        short = llava_names.short_name(name)
        return NAMES[short] if short in NAMES else llava_names.local_name(name, self.tower.num_layers)


class Gemma3:
    """The Family of Gemma 3."""

    placeholder = START
    around = "\n\n"
    video_placeholder: str | None = None
    video_placeholder_id: int | None = None
    part_tokens = (START, END)

    def __init__(self, config: Settings, vision: Gemma3Vision, settings: PictureSettings) -> None:
        """config: config.json."""
        self.placeholder_id = config.token_id("boi_token_index", 255999)
        self.inner_id = config.token_id("image_token_index", config.get("image_token_id", 262144))
        self.normalisation = settings.normalisation
        self._settings = settings
        self._num_tokens = vision.num_tokens

    def prepare(self, pictures: Sequence[Image], modality: Modality) -> list[Prepared]:
        return [Prepared(fit(picture, self._settings)[None], self._num_tokens) for picture in pictures]

    def parts(self, prepared: Prepared) -> Sequence[PicturePart]:
        if prepared.num_tokens != self._num_tokens:
            raise RequestFailed(f"a picture of this model has {self._num_tokens} tokens, not {prepared.num_tokens}")
        return (PicturePart(prepared.num_tokens, START, is_whole=True), PicturePart(0, END))


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma3:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    config, vision = Settings("config.json", hf), parse_vision(hf)
    settings, file = picture_settings(preprocessor, PROCESSOR), Settings(FILE, preprocessor)
    if file.flag("do_pan_and_scan", False):
        raise file.fault("do_pan_and_scan", "is not supported: set it to false, so that a picture is shown once")
    size = vision.tower.image_size
    if settings.output_size != (size, size):
        raise file.fault("size", f"must make pictures of the encoder's size: {size} x {size}")
    return Gemma3(config, vision, settings)


def parse_vision(hf: Mapping[str, Any]) -> Gemma3Vision:
    """Reads config.json. Raises StartupError naming the key at fault."""
    config = Settings("config.json", hf)
    tower = parse_tower(config.part("vision_config"), ("siglip_vision_model",))
    num_tokens, side = config.integer("mm_tokens_per_image", 256), tower.image_size // tower.patch_size
    tokens = math.isqrt(num_tokens)
    if tokens**2 != num_tokens or side % tokens or not side:
        raise config.fault(
            "mm_tokens_per_image", f"{num_tokens} must be a square whose side divides the tower's patches, {side}"
        )
    return Gemma3Vision(tower=tower, pooled=side // tokens)
