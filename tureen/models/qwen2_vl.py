"""Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191, arXiv:2502.13923): Qwen2.5 with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.media import qwen_vl
from tureen.media.qwen_vision import QwenVision
from tureen.models.config import ModelConfig, common, sliding_windows, with_sections
from tureen.models.published import Published
from tureen.models.reading import layer_number

ARCHITECTURES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
FAMILIES = {
    "Qwen2-VL": Published("Qwen/Qwen2-VL-2B-Instruct", "2.2B, 8.3B, 73B"),
    "Qwen2.5-VL": Published("Qwen/Qwen2.5-VL-3B-Instruct", "3.8B, 8.3B, 33B, 73B", calls="hermes"),
}
SECTIONS = (16, 24, 24)


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = with_sections(common(hf), hf, SECTIONS, alternate=False)
    first = layer_number(hf, "max_window_layers", 80)  # this layer and those after it slide
    slides = [layer >= first for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides) if hf.get("use_sliding_window") else config.windows
    return replace(config, qkv_bias=True, windows=windows)


def parse_vision(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return qwen_vl.vision_config(hf)
