"""Llama (arXiv:2302.13971, 2407.21783) and what shares its layers: SmolLM2, Vicuna, Mistral (arXiv:2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Raises StartupError naming the key of the config that is missing, wrong or not supported."""
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    slides = config.architecture == "MistralForCausalLM" and hf.get("sliding_window") is not None
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
    )
