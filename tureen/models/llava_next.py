"""LLaVA-NeXT, also called 1.6: LLaVA with pictures of any resolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.media import llava_next
from tureen.media.vision_config import VisionConfig
from tureen.models import multimodal

ARCHITECTURES = ("LlavaNextForConditionalGeneration",)


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside. Raises StartupError."""
    return multimodal.text_config(hf, "llama", ties_if_text_does=False)


def parse_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return llava_next.vision_config(hf)
