"""EmbeddingGemma (arXiv:2509.20354): Gemma 3 in which each token sees those after it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.errors import echo
from tureen.models import gemma3
from tureen.models.encoder import EncoderConfig
from tureen.models.reading import fault, integer

ENCODER_ARCHITECTURES = ("Gemma3TextModel",)
RENAMES = (("model.", ""),)


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    if hf.get("use_bidirectional_attention") is not True:
        raise fault(
            "use_bidirectional_attention",
            f"must be true for an embedding model, got {echo(hf.get('use_bidirectional_attention'))}",
        )
    decoder = gemma3.parse({**hf, "use_bidirectional_attention": False})
    on_each_side = integer({**gemma3.DEFAULTS, **hf}, "sliding_window") // 2
    return EncoderConfig(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        norm_eps=decoder.norm_eps,
        max_tokens=decoder.context_len,
        activation=decoder.activation,
        attention_scale=decoder.attention_scale,
        windows=tuple(None if window is None else on_each_side for window in decoder.windows),
        ropes=decoder.ropes,
        has_embedding_norm=False,
        embedding_scale=decoder.embedding_scale,
        pre_norms=True,
        post_norms=True,
        final_norm=True,
        rms_norms=True,
        unit_offset_norm=True,
        qk_norm=True,
        qkv_bias=decoder.qkv_bias,
        out_bias=decoder.out_bias,
        mlp_bias=False,
        is_gated=True,
    )
