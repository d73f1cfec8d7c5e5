"""OLMoE (arXiv:2409.02060): Llama's block with experts; q and k are normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common
from tureen.models.published import Published
from tureen.models.reading import integer, refuse

ARCHITECTURES = ("OlmoeForCausalLM",)
FAMILIES = {
    "OLMoE": Published("allenai/OLMoE-1B-7B-0125-Instruct", "7B-A1B"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1e-5, **hf}
    refuse(hf, clip_qkv=None)
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    experts = Experts(
        count=integer(hf, "num_experts", integer(hf, "num_local_experts", 64)),
        num_chosen=integer(hf, "num_experts_per_tok", 8),
        size=config.intermediate_size,
        is_normalised=bool(hf.get("norm_topk_prob", False)),
    )
    return replace(config, qkv_bias=bias, out_bias=bias, qk_norm="all", experts=(checked(experts),) * config.num_layers)
