"""Apertus (arXiv:2509.14233): Llama's block with q and k normalised, and an mlp without a gate with xIELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published
from tureen.models.reading import refuse

ARCHITECTURES = ("ApertusForCausalLM",)
FAMILIES = {
    "Apertus": Published("swiss-ai/Apertus-8B-Instruct-2509", "8B, 70B", calls="apertus"),
}
RENAMES = ((".attention_layernorm.", ".input_layernorm."), (".feedforward_layernorm.", ".post_attention_layernorm."))
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    refuse(hf, hidden_act="xielu")
    config = common({"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, **hf, "hidden_act": None})
    bias = bool(hf.get("attention_bias", False))
    return replace(config, activation="xielu", qkv_bias=bias, out_bias=bias, qk_norm="head", gated_mlp=False)
