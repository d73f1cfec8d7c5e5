"""Gemma 2 (arXiv:2408.00118): four norms a block, every other layer with a sliding window, softcapped logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import number, optional_number, refuse

ARCHITECTURES = ("Gemma2ForCausalLM",)
FAMILIES = {
    "Gemma 2": Published("google/gemma-2-2b-it", "2.6B, 9B, 27B"),
}

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
"""Published configs leave out what equals these."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    refuse(hf, use_bidirectional_attention=False)
    config = common(hf)
    bias = bool(hf.get("attention_bias", False))
    slides = [layer % 2 == 0 for layer in range(config.num_layers)]
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        norms="both",
        unit_offset_norm=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=number(hf, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=optional_number(hf, "attn_logit_softcapping"),
        logit_softcap=optional_number(hf, "final_logit_softcapping"),
        windows=sliding_windows(hf, config.num_layers, slides),
    )
