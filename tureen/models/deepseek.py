"""DeepSeek V2 and V3 (arXiv:2405.04434, arXiv:2412.19437), and models of their shape: latent attention, and experts of
which some are shared by all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked
from tureen.models.latents import apart, experts_v3, routed, with_latent
from tureen.models.published import Published
from tureen.models.reading import fault, integer, layer_number, refuse

__all__ = ["apart"]
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
FAMILIES = {
    "DeepSeek V2": Published("deepseek-ai/DeepSeek-V2-Lite-Chat", "16B-A2.4B, 236B-A21B"),
    "DeepSeek V3, R1": Published("deepseek-ai/DeepSeek-V3", "671B-A37B", calls="deepseek_v3", thoughts="deepseek-v3"),
    "Kimi K2": Published("moonshotai/Kimi-K2-Instruct", "1000B-A32B"),
    "Moonlight": Published("moonshotai/Moonlight-16B-A3B-Instruct", "16B-A3B"),
}
RENAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
"""Parts of a checkpoint's names -> our names."""

V2 = {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}
V3 = V2 | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
"""Values of keys that a config leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    is_v3 = "DeepseekV3ForCausalLM" in hf.get("architectures", ())
    hf = {**(V3 if is_v3 else V2), **hf}
    refuse(hf, moe_layer_freq=1, mlp_bias=False)
    config = with_latent(hf, is_interleaved=bool(hf.get("rope_interleave", True)) or not is_v3)
    experts = experts_v3(hf) if is_v3 else _experts_v2(hf)
    first = layer_number(hf, "first_k_dense_replace", 0)
    return replace(
        config,
        experts=tuple(None if layer < first else experts for layer in range(config.num_layers)),
        extra_layers=layer_number(hf, "num_nextn_predict_layers", 1 if is_v3 else 0),
    )


def _experts_v2(hf: Mapping[str, Any]) -> Experts:
    refuse(hf, norm_topk_prob=False, scoring_func="softmax")
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fault("topk_method", f"{echo(method)} is not supported; only greedy and group_limited_greedy are")
    if method == "greedy":
        return checked(routed(hf))
    groups = {"num_groups": integer(hf, "n_group"), "num_chosen_groups": integer(hf, "topk_group")}
    return checked(replace(routed(hf), group_top_k=1, **groups))
