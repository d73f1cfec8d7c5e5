"""Falcon-H1 (TII, 2025, arXiv:2507.22448): attention and Mamba 2 of the same inputs in each layer, with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.mixers import Mamba2
from tureen.models.config import ModelConfig, Multipliers, common
from tureen.models.mamba import has, mamba2
from tureen.models.published import Published
from tureen.models.reading import fault, integer, number

ARCHITECTURES = ("FalconH1ForCausalLM",)
FAMILIES = {"Falcon-H1": Published("tiiuae/Falcon-H1-0.5B-Instruct", "0.5B, 1.5B, 3B, 7B, 34B")}
RENAMES = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    config = common(defaults | {key: value for key, value in hf.items() if value is not None})
    bias = has(hf, "attention_bias", default=False)
    gate, mlp_out = _several(hf, "mlp_multipliers", 2)
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=has(hf, "mlp_bias", default=False),
        mixers=(_mixer(hf),) * config.num_layers,
        mixers_beside=True,
        embedding_scale=number(hf, "embedding_multiplier", 1.0),
        attention_scale=config.attention_scale * number(hf, "key_multiplier", 1.0),
        logit_scale=number(hf, "lm_head_multiplier", 1.0),
        multipliers=Multipliers(
            attention_in=number(hf, "attention_in_multiplier", 1.0),
            attention_out=number(hf, "attention_out_multiplier", 1.0),
            gate=gate,
            mlp_out=mlp_out,
        ),
    )


def _mixer(hf: Mapping[str, Any]) -> Mamba2:
    size = None if "mamba_d_ssm" in hf and hf["mamba_d_ssm"] is None else integer(hf, "mamba_d_ssm", 1024)
    gate, values, keys, queries, steps = _several(hf, "ssm_multipliers", 5)
    return replace(
        mamba2(hf, size),
        out_bias=has(hf, "projectors_bias", default=False),
        has_norm=has(hf, "mamba_rms_norm", default=False),
        gate_last=has(hf, "mamba_norm_before_gate", default=True) and has(hf, "mamba_rms_norm", default=False),
        in_scale=number(hf, "ssm_in_multiplier", 1.0),
        scales=(gate, values, keys, queries, steps),
        out_scale=number(hf, "ssm_out_multiplier", 1.0),
    )


def _several(hf: Mapping[str, Any], key: str, count: int) -> list[float]:
    """Reads a list of `count` positive numbers; a missing or null key gives ones."""
    values = hf.get(key)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count:
        raise fault(key, f"must be a list of {count} numbers, got {echo(values)}")
    return [number({key: value}, key) for value in values]
