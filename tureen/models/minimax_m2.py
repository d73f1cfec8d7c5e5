"""MiniMax-M2 (MiniMax, 2025): experts chosen by sigmoid scores; q and k are normalised over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import EXPERT_NAMES, ModelConfig, checked, common
from tureen.models.published import Published
from tureen.models.reading import integer, refuse

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
FAMILIES = {
    "MiniMax-M2": Published("MiniMaxAI/MiniMax-M2", "230B-A10B", calls="minimax_m2", thoughts="deepseek-r1"),
}
RENAMES = (
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    *EXPERT_NAMES,
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    refuse(hf, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
    refuse(hf, shared_intermediate_size=0)
    hf = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0, **hf}
    if hf.get("rotary_dim") is not None:
        hf["partial_rotary_factor"] = integer(hf, "rotary_dim") / integer(hf, "head_dim")
    config = common(hf)
    experts = Experts(
        count=integer(hf, "num_local_experts", 256),
        num_chosen=integer(hf, "num_experts_per_tok", 8),
        size=config.intermediate_size,
        is_normalised=True,
        score="sigmoid",
        has_correction=True,
    )
    return replace(config, qk_norm="all", experts=(checked(experts),) * config.num_layers)
