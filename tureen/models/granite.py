"""Granite 3 (IBM, 2024): Llama's block with multipliers for embeddings, residuals, attention and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, number

ARCHITECTURES = ("GraniteForCausalLM",)


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    bias = bool(hf.get("attention_bias", False))
    return replace(
        common(hf),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        embedding_scale=number(hf, "embedding_multiplier", 1.0),
        residual_scale=number(hf, "residual_multiplier", 1.0),
        attention_scale=number(hf, "attention_multiplier", 1.0),
        logit_scale=1 / number(hf, "logits_scaling", 1.0),
    )
