"""Qwen3 (arXiv:2505.09388), dense: Llama's block with q and k normalised per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import layer_number

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification")
FAMILIES = {
    "Qwen3": Published("Qwen/Qwen3-0.6B", "0.6B, 1.7B, 4B, 8B, 14B, 32B", calls="hermes", thoughts="qwen3"),
}
TEXT_DEFAULTS = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
"""Values, by model_type, of keys that the text_config of a larger model leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"head_dim": 128, **hf})
    bias = bool(hf.get("attention_bias", False))
    first = layer_number(hf, "max_window_layers", 28)  # this layer and those after it slide
    slides = [layer >= first for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides) if hf.get("use_sliding_window") else config.windows
    return replace(config, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=windows)
