"""Hunyuan (Tencent, 2025), dense and A13B with experts: q and k are normalised after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common
from tureen.models.published import Published
from tureen.models.reading import integer, number
from tureen.models.ropes import rope_parameters

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM")
FAMILIES = {
    "Hunyuan": Published(
        "tencent/Hunyuan-0.5B-Instruct", "0.5B, 1.8B, 4B, 7B, 80B-A13B", calls="hunyuan", thoughts="hunyuan-a13b"
    ),
}
RENAMES = (
    (".self_attn.query_layernorm.", ".self_attn.q_norm."),
    (".self_attn.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.wg.", ".mlp.gate."),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"rms_norm_eps": 1e-5, **hf, **_stretched(hf)})
    bias = bool(hf.get("attention_bias", False))
    config = replace(config, qkv_bias=bias, out_bias=bias, qk_norm="head", qk_norm_last=True)
    if config.architecture == "HunYuanDenseV1ForCausalLM":
        return config
    experts = Experts(
        count=_same_in_all_layers(hf, "num_experts", 1),
        num_chosen=_same_in_all_layers(hf, "moe_topk", 1),
        size=config.intermediate_size,
        is_normalised=True,
        shared_size=config.intermediate_size,
        has_shared_gate=False,
    )
    return replace(config, experts=(checked(experts),) * config.num_layers)


def _stretched(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rope of the default kind whose theta has grown by `alpha`, if the config has that."""
    parameters = rope_parameters(hf)
    if not parameters.get("alpha"):
        return {}
    heads = integer(hf, "num_attention_heads")
    dim = integer(hf, "head_dim", integer(hf, "hidden_size") // heads)
    theta = number({"rope_theta": hf.get("rope_theta"), **parameters}, "rope_theta", 10_000.0)
    grown = theta * number(parameters, "alpha") ** (dim / (dim - 2))
    return {"rope_scaling": None, "rope_parameters": {"rope_theta": grown}}


def _same_in_all_layers(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Reads a count like `integer`, or a list of one for each layer that are all the same."""
    value = hf.get(key)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    return integer({key: value}, key, default)
