"""Arcee AFM (arXiv:2509.18091): Llama's block; an mlp without a gate, with the square of ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published

ARCHITECTURES = ("ArceeForCausalLM",)
FAMILIES = {
    "Arcee AFM": Published("arcee-ai/AFM-4.5B", "4.5B"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    bias = bool(hf.get("attention_bias", False))
    return replace(
        common({"hidden_act": "relu2", "rms_norm_eps": 1e-5, **hf}),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        gated_mlp=False,
    )
