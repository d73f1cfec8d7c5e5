"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): SigLIP, a projection and Llama; pictures in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.media import idefics3_vision
from tureen.media.idefics3_vision import Idefics3Vision
from tureen.models import multimodal
from tureen.models.published import Published

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
FAMILIES = {
    "Idefics3": Published("HuggingFaceM4/Idefics3-8B-Llama3", "8B"),
    "SmolVLM, SmolVLM2": Published("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", "0.3B, 0.5B, 2.2B"),
}
DEFAULT_TEXT = {"rms_norm_eps": 1e-5}
"""The text_config if config.json has none; Llama's defaults hold for the other keys."""


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside. Raises StartupError."""
    if hf.get("text_config") is None:
        hf = {**hf, "text_config": DEFAULT_TEXT}
    return multimodal.text_config(hf, "llama", ties_if_text_does=False)


def parse_vision(hf: Mapping[str, Any]) -> Idefics3Vision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return idefics3_vision.parse_vision(hf)
