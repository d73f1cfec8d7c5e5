"""Gemma 3 (arXiv:2503.19786), text: four norms a block, most layers with a sliding window and a rope of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.rope import RopeConfig
from tureen.models.config import ModelConfig, common, integer, number, refuse, rope, rope_parameters, sliding_windows

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Published configs leave out what equals these."""
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
FULL_EVERY = 6  # layers, unless the config says otherwise


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    refuse(hf, use_bidirectional_attention=False, attn_logit_softcapping=0, final_logit_softcapping=0)
    config = common({key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling")})
    every = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", FULL_EVERY))
    slides = [(layer + 1) % every != 0 for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides)
    local, full = _ropes(hf)
    bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        post_norms=True,
        unit_offset_norm=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=number(hf, "query_pre_attn_scalar") ** -0.5,
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Returns the ropes of layers with a window and of layers without. Scaling concerns the latter alone, unless given
    for each."""
    parameters = rope_parameters(hf)
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local = rope_parameters({"rope_parameters": parameters.get("sliding_attention")})
        full = rope_parameters({"rope_parameters": parameters.get("full_attention")})
    else:
        local, full = {}, parameters
    return (
        rope({}, local, theta=hf.get("rope_local_base_freq") or LOCAL_THETA),
        rope({}, full, theta=hf.get("rope_theta") or GLOBAL_THETA),
    )
