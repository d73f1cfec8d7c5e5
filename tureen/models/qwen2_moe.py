"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts, one of them shared by all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common, sliding_windows, sparse_layers
from tureen.models.published import Published
from tureen.models.reading import integer, layer_number

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
FAMILIES = {
    "Qwen1.5-MoE": Published("Qwen/Qwen1.5-MoE-A2.7B-Chat", "14B-A2.7B"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common(hf)
    first = layer_number(hf, "max_window_layers", 28)  # layers before it slide, every other one
    slides = [layer % 2 == 0 and layer < first for layer in range(config.num_layers)]
    experts = Experts(
        count=integer(hf, "num_experts", integer(hf, "num_local_experts", 60)),  # transformers writes either
        num_chosen=integer(hf, "num_experts_per_tok", 4),
        size=integer(hf, "moe_intermediate_size", 1408),
        is_normalised=bool(hf.get("norm_topk_prob", False)),
        shared_size=integer(hf, "shared_expert_intermediate_size", 5632),
    )
    return replace(
        config,
        qkv_bias=bool(hf.get("qkv_bias", True)),
        windows=sliding_windows(hf, config.num_layers, slides) if hf.get("use_sliding_window") else config.windows,
        experts=sparse_layers(hf, config.num_layers, checked(experts)),
    )
