"""Llama (arXiv:2302.13971, 2407.21783) and what shares its layers: SmolLM2, Vicuna, Mistral (arXiv:2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MistralModel")
FAMILIES = {
    "Llama 3": Published("meta-llama/Llama-3.2-1B-Instruct", "1.2B, 3B, 8B, 70B", calls="llama3"),
    "SmolLM2": Published("HuggingFaceTB/SmolLM2-135M-Instruct", "0.1B, 0.4B, 1.7B", calls="hermes"),
    "Mistral 7B, Nemo": Published("mistralai/Mistral-7B-Instruct-v0.3", "7B, 12B", calls="mistral"),
}
TEXT_DEFAULTS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
"""Values, by model_type, of keys that the text_config of a larger model leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    slides = config.architecture.startswith("Mistral") and hf.get("sliding_window") is not None
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
    )
