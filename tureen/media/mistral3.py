"""Mistral Small 3.1 and 3.2, and Ministral 3 (Mistral AI, 2025): Pixtral's tower, four patches to a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.media.pixtral import Pixtral, parse_pixtral
from tureen.media.settings import Settings
from tureen.media.vision_config import PIXTRAL, VisionConfig, parse_vision

MODEL_TYPES = ("mistral3",)
VISION_IS_OPTIONAL = ("mistral3",)
"""Models that take text only where config.json has no vision_config."""


def parse(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Pixtral:
    """Reads both configs. Raises StartupError naming the key that is missing, wrong or not supported."""
    return parse_pixtral(hf, vision_config(hf), preprocessor)


def vision_config(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision encoder's description from config.json. Raises StartupError naming the key at fault."""
    config = Settings("config.json", hf)
    bias = {"multimodal_projector_bias": config.flag("multimodal_projector_bias", False)}
    vision = parse_vision(
        {**hf, **bias}, {"model_type": PIXTRAL}, layer=-1, strategy="full", has_newline=False, kinds=(PIXTRAL,)
    )
    if len(vision.feature_layers) != 1:
        raise config.fault("vision_feature_layer", "must be one layer: the projector's norm takes no more")
    text = config.part("text_config")
    eps = text.number("rms_norm_eps", config.number("rms_norm_eps", text_norm_eps(text.get("model_type"))))
    return replace(vision, merge_size=config.integer("spatial_merge_size", 2), merger_eps=eps)


def text_norm_eps(model_type: object) -> float:
    """Returns rms_norm_eps of a text model whose config gives none; the projector has the same."""
    return 1e-6 if model_type == "mistral" else 1e-5
