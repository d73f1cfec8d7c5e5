"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): Llama's block with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import layer_number

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen2Model")
FAMILIES = {
    "Qwen2.5": Published("Qwen/Qwen2.5-0.5B-Instruct", "0.5B, 1.5B, 3B, 7B, 14B, 32B, 72B", calls="hermes"),
    "DeepSeek-R1-Distill-Qwen": Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "1.8B, 7B, 14B, 32B", thoughts="deepseek-r1"
    ),
}
TEXT_DEFAULTS = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
"""Values, by model_type, of keys that the text_config of a larger model leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common(hf)
    first = layer_number(hf, "max_window_layers", 28)  # this layer and those after it slide
    slides = [layer >= first for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides) if hf.get("use_sliding_window") else config.windows
    return replace(config, qkv_bias=True, windows=windows)
