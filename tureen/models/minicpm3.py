"""MiniCPM3 (OpenBMB, 2024): latent attention, and factors of embeddings, residuals and logits (arXiv:2404.06395)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig
from tureen.models.latents import apart, with_latent
from tureen.models.published import Published
from tureen.models.reading import integer, number, refuse

__all__ = ["apart"]
ARCHITECTURES = ("MiniCPM3ForCausalLM",)
FAMILIES = {"MiniCPM3": Published("openbmb/MiniCPM3-4B", "4B")}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
}
"""Values of keys that a config leaves out."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    hidden_size, layers = integer(hf, "hidden_size"), integer(hf, "num_hidden_layers")
    if hf.get("v_head_dim") is None:
        hf["v_head_dim"] = hidden_size // integer(hf, "num_attention_heads")
    refuse(hf, mlp_bias=False)
    return replace(
        with_latent(hf, is_interleaved=False),
        embedding_scale=number(hf, "scale_emb", 12),
        residual_scale=number(hf, "scale_depth", math.sqrt(layers) if "scale_depth" in hf else 1.4) / math.sqrt(layers),
        logit_scale=integer(hf, "dim_model_base", hidden_size if "dim_model_base" in hf else 256) / hidden_size,
    )
