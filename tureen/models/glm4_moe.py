"""GLM-4.5 and 4.6 (arXiv:2508.06471): experts chosen by sigmoid scores, one of them shared by all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.latents import experts_v3
from tureen.models.published import Published
from tureen.models.reading import layer_number

ARCHITECTURES = ("Glm4MoeForCausalLM",)
FAMILIES = {
    "GLM-4.5, GLM-4.6": Published("zai-org/GLM-4.5-Air", "106B-A12B, 355B-A32B", calls="glm45", thoughts="glm45"),
}
RENAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
"""Parts of a checkpoint's names -> our names."""

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}
"""Values of keys that a config leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    config, experts = common(hf), experts_v3(hf)
    first = layer_number(hf, "first_k_dense_replace", 1)
    return replace(
        config,
        qkv_bias=bool(hf.get("attention_bias", False)),
        qk_norm="head" if hf.get("use_qk_norm") else "",
        experts=tuple(None if layer < first else experts for layer in range(config.num_layers)),
        extra_layers=layer_number(hf, "num_nextn_predict_layers", 0),
    )
