"""Ministral 3 and Mistral Small 3 (Mistral AI, 2025): Mistral's block; queries may grow with the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.media import mistral3
from tureen.media.vision_config import VisionConfig
from tureen.models.config import ModelConfig, QueryGrowth, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import integer, number
from tureen.models.ropes import rope_parameters

ARCHITECTURES = ("Ministral3ForCausalLM", "MinistralForCausalLM", "Mistral3ForConditionalGeneration")
FAMILIES = {
    "Ministral 3, Mistral Small 3": Published(
        "mistralai/Ministral-3-3B-Instruct-2512", "3.8B, 8B, 14B, 24B", calls="mistral", thoughts="mistral"
    ),
}
DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""Published configs leave out keys that have these values."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, "rms_norm_eps": mistral3.text_norm_eps(hf.get("model_type")), **hf}
    config = common(hf)
    slides = hf.get("sliding_window") is not None
    windows = sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers)
    parameters = rope_parameters(hf)
    if parameters.get("llama_4_scaling_beta") is None:
        return replace(config, windows=windows)
    growth = QueryGrowth(
        beta=number(parameters, "llama_4_scaling_beta"), every=integer(parameters, "original_max_position_embeddings")
    )
    return replace(config, windows=windows, query_growth=growth)


def parse_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return mistral3.vision_config(hf)
