"""Phi-3.5-MoE and Phi-mini-MoE (arXiv:2404.14219): layer norms, and two experts a token, chosen one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import EXPERT_NAMES, ModelConfig, checked, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import fault, integer, number, refuse
from tureen.models.ropes import rope_parameters

ARCHITECTURES = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
FAMILIES = {
    "Phi-3.5-MoE": Published("microsoft/Phi-mini-MoE-instruct", "7.6B-A2B, 42B-A7B"),
}
RENAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    *EXPERT_NAMES,
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0, **hf, **_magnitude(hf)}
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    slides = hf.get("sliding_window") is not None
    experts = Experts(
        count=integer(hf, "num_local_experts", 16),
        num_chosen=2,
        size=config.intermediate_size,
        is_normalised=False,
        score="sparsemixer",
        jitter=number(hf, "router_jitter_noise", 0.01),
    )
    refuse(hf, num_experts_per_tok=experts.num_chosen)
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        head_bias=bool(hf.get("lm_head_bias", False)),
        layer_norm=True,
        norm_bias=True,
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
        experts=(checked(experts),) * config.num_layers,
    )


def _magnitude(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns LongRoPE's settings with the magnitude that the config gives for short and for long texts."""
    parameters = rope_parameters(hf)
    if parameters.get("short_mscale") is None:
        return {}
    short, long = number(parameters, "short_mscale"), number(parameters, "long_mscale")
    if short != long:
        raise fault("rope_scaling", f"short_mscale {short:g} and long_mscale {long:g} must be equal")
    return {"rope_scaling": None, "rope_parameters": {**parameters, "attention_factor": short}}
