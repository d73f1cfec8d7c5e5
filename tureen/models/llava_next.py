"""LLaVA-NeXT, also called 1.6: LLaVA with pictures of any resolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.media import llava_next
from tureen.media.vision_config import VisionConfig
from tureen.models import multimodal
from tureen.models.published import Published

ARCHITECTURES = ("LlavaNextForConditionalGeneration",)
FAMILIES = {
    "LLaVA-NeXT": Published("llava-hf/llava-v1.6-mistral-7b-hf", "7B, 13B, 34B"),
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside. Raises StartupError."""
    return multimodal.text_config(hf, "llama", ties_if_text_does=False)


def parse_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return llava_next.vision_config(hf)
