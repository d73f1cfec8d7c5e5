"""LLaVA-OneVision (arXiv:2408.03326): SigLIP, a projector and Qwen2; pictures of any resolution, and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.media import llava_onevision
from tureen.media.vision_config import VisionConfig
from tureen.models import multimodal
from tureen.models.published import Published

ARCHITECTURES = ("LlavaOnevisionForConditionalGeneration",)
FAMILIES = {
    "LLaVA-OneVision": Published("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "0.9B, 8B"),
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside. Raises StartupError."""
    return multimodal.text_config(hf, "qwen2", ties_if_text_does=True)


def parse_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return llava_onevision.vision_config(hf)
