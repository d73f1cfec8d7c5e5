"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2, with attention in some of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.models.config import ModelConfig, common
from tureen.models.mamba import has, mamba2
from tureen.models.published import Published
from tureen.models.reading import fault

ARCHITECTURES = ("BambaForCausalLM",)
FAMILIES = {"Bamba": Published("ibm-ai-platform/Bamba-9B-v2", "9.8B")}
RENAMES = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("model.final_layernorm.", "model.norm."),
)
"""Parts of a checkpoint's names -> our names."""
ROTATED = 0.5  # of a head's dimensions


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": ROTATED}
    config = common(defaults | {key: value for key, value in hf.items() if value is not None})
    with_attention = hf.get("attn_layer_indices") or []
    if not isinstance(with_attention, list):
        raise fault("attn_layer_indices", f"must be a list of layers, got {echo(with_attention)}")
    mixer, bias = mamba2(hf), has(hf, "attention_bias", default=False)
    mixers = tuple(None if layer in with_attention else mixer for layer in range(config.num_layers))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=has(hf, "mlp_bias", default=False),
        mixers=mixers,
        ropes=tuple(None if own else rope for own, rope in zip(mixers, config.ropes, strict=True)),
    )
