"""Gemma 3 (arXiv:2503.19786): four norms a block, most layers with a sliding window and a rope of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.media import gemma3
from tureen.media.gemma3 import Gemma3Vision
from tureen.models.config import ModelConfig, WholePictures, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import integer, number, refuse
from tureen.models.ropes import ropes_of_windows, without_ropes

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
FAMILIES = {
    "Gemma 3": Published("google/gemma-3-270m-it", "0.3B, 1B, 4B, 12B, 27B"),
}

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
    config = common(without_ropes(hf))
    every = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", FULL_EVERY))
    slides = [(layer + 1) % every != 0 for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides)
    local = number(hf, "rope_local_base_freq", LOCAL_THETA)
    full = number(hf, "rope_theta", GLOBAL_THETA)
    bias = bool(hf.get("attention_bias", False))
    sees = hf.get("vision_config") is not None
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norms="both",
        unit_offset_norm=True,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=number(hf, "query_pre_attn_scalar") ** -0.5,
        windows=windows,
        ropes=ropes_of_windows(hf, windows, local_theta=local, full_theta=full),
        whole_pictures=WholePictures("all", integer(hf, "mm_tokens_per_image", 256)) if sees else None,
    )


def parse_vision(hf: Mapping[str, Any]) -> Gemma3Vision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return gemma3.parse_vision(hf)
