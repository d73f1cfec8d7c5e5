"""LLaVA-1.5 (arXiv:2310.03744) and Pixtral (arXiv:2410.07073): CLIP, SigLIP, DINOv2 or Pixtral's tower, a projector,
and a text model of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.media import llava
from tureen.media.vision_config import VisionConfig
from tureen.models import multimodal
from tureen.models.published import Published

ARCHITECTURES = ("LlavaForConditionalGeneration",)
FAMILIES = {
    "LLaVA 1.5": Published("llava-hf/llava-1.5-7b-hf", "7B, 13B"),
    "Pixtral": Published("mistral-community/pixtral-12b", "12B, 124B"),
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside. Raises StartupError."""
    return multimodal.text_config(hf, "llama", ties_if_text_does=True)


def parse_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return llava.vision_config(hf)
