"""GLM-4-0414 (Zhipu AI, 2025): GLM-4 with four norms a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published
from tureen.models.ropes import interleaved

ARCHITECTURES = ("Glm4ForCausalLM",)
FAMILIES = {
    "GLM-4-0414": Published("zai-org/GLM-4-9B-0414", "9B, 32B"),
}
RENAMES = (
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, **hf})
    bias = bool(hf.get("attention_bias", True))
    return replace(config, qkv_bias=bias, norms="both", ropes=interleaved(config.ropes))
