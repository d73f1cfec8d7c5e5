"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common, sliding_windows, sparse_layers
from tureen.models.published import Published
from tureen.models.reading import integer

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
FAMILIES = {
    "Qwen3 MoE": Published("Qwen/Qwen3-30B-A3B-Instruct-2507", "30B-A3B, 235B-A22B", calls="hermes", thoughts="qwen3"),
    "Qwen3-Coder": Published("Qwen/Qwen3-Coder-30B-A3B-Instruct", "30B-A3B, 480B-A35B", calls="qwen3_coder"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"num_key_value_heads": 4, **hf})
    bias = bool(hf.get("attention_bias", False))
    slides = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
    experts = Experts(
        count=integer(hf, "num_experts", integer(hf, "num_local_experts", 128)),  # transformers writes either
        num_chosen=integer(hf, "num_experts_per_tok", 8),
        size=integer(hf, "moe_intermediate_size", 768),
        is_normalised=bool(hf.get("norm_topk_prob", False)),
    )
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
        experts=sparse_layers(hf, config.num_layers, checked(experts)),
    )
