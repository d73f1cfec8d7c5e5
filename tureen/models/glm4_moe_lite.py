"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek V3's latent attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.models.config import ModelConfig
from tureen.models.latents import apart, experts_v3, with_latent
from tureen.models.published import Published
from tureen.models.reading import fault, layer_number

__all__ = ["apart"]
ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)
FAMILIES = {
    "GLM-4.7-Flash": Published("zai-org/GLM-4.7-Flash", "30B-A3B", calls="glm47", thoughts="glm45"),
}
RENAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
"""Parts of a checkpoint's names -> our names."""
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}
"""Values of keys that a config leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    config = with_latent(hf, is_interleaved=bool(hf.get("rope_interleave", True)))
    experts, layers = experts_v3(hf), config.num_layers
    first = min(layers, layer_number(hf, "first_k_dense_replace", 1))
    kinds = hf.get("mlp_layer_types") or ["dense"] * first + ["sparse"] * (layers - first)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fault("mlp_layer_types", f"must say dense or sparse for each of {layers} layers, got {echo(kinds)}")
    return replace(
        config,
        experts=tuple(experts if kind == "sparse" else None for kind in kinds),
        extra_layers=layer_number(hf, "num_nextn_predict_layers", 0),
    )
