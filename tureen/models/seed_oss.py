"""Seed-OSS (ByteDance, 2025): Llama's block with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published

ARCHITECTURES = ("SeedOssForCausalLM",)
FAMILIES = {
    "Seed-OSS": Published("ByteDance-Seed/Seed-OSS-36B-Instruct", "36B", calls="seed_oss", thoughts="seed-oss"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"num_key_value_heads": 8, "head_dim": 128, **hf})
    return replace(
        config,
        qkv_bias=bool(hf.get("attention_bias", True)),
        out_bias=bool(hf.get("attention_out_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )
