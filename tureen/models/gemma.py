"""Gemma 1 (arXiv:2403.08295): Llama's block with GELU, embeddings scaled, norms that multiply by 1 + weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published
from tureen.models.reading import refuse

ARCHITECTURES = ("GemmaForCausalLM",)
FAMILIES = {
    "Gemma 1": Published("google/gemma-2b-it", "2.5B, 8.5B"),
}
DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Published configs leave out the keys that have these values."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf, "hidden_activation": hf.get("hidden_activation") or "gelu_pytorch_tanh"}
    refuse(hf, use_bidirectional_attention=False)  # "hidden_act": "gelu" means the tanh form too
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        unit_offset_norm=True,
        embedding_scale=config.hidden_size**0.5,
    )
