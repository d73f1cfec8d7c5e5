"""ModernBERT (arXiv:2412.13663): rotated positions, most layers with a window, a gated mlp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models.config import sliding_windows
from tureen.models.encoder import EncoderConfig, EncoderHead, activation, expect, is_classifier, of_heads
from tureen.models.reading import integer, number
from tureen.models.ropes import rope

ENCODER_ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification")
RENAMES = (
    ("model.", ""),
    ("embeddings.tok_embeddings.", "embed_tokens."),
    ("embeddings.norm.", "embed_norm."),
    ("attn.Wqkv.", "self_attn.qkv_proj."),
    ("attn.Wo.", "self_attn.o_proj."),
    ("mlp.Wi.", "mlp.gate_up_proj."),
    ("mlp.Wo.", "mlp.down_proj."),
    ("attn_norm.", "input_layernorm."),
    ("mlp_norm.", "pre_feedforward_layernorm."),
    ("final_norm.", "norm."),
    ("classifier.", "head.out."),
)
GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
FULL_EVERY = 3
"""Values of keys that config.json may leave out."""


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    expect(hf, is_decoder=False)
    layers, every = integer(hf, "num_hidden_layers"), integer(hf, "global_attn_every_n_layers", FULL_EVERY)
    window = {**hf, "sliding_window": integer(hf, "local_attention", 128) // 2}
    windows = sliding_windows(window, layers, [layer % every != 0 for layer in range(layers)])
    parameters = hf.get("rope_parameters") or {}
    full = number(hf, "global_rope_theta", GLOBAL_THETA)
    local = number(hf, "local_rope_theta", full if "local_rope_theta" in hf else LOCAL_THETA)
    ropes = {
        True: rope({}, parameters.get("full_attention") or {}, theta=full),
        False: rope({}, parameters.get("sliding_attention") or {}, theta=local),
    }
    return EncoderConfig(
        vocab_size=integer(hf, "vocab_size"),
        intermediate_size=integer(hf, "intermediate_size"),
        norm_eps=number(hf, "norm_eps", 1e-5),
        max_tokens=integer(hf, "max_position_embeddings"),
        activation=activation(hf, "hidden_activation"),
        windows=windows,
        ropes=tuple(ropes[window is None] for window in windows),
        pre_norms=True,
        first_norm=False,
        final_norm=True,
        norm_bias=bool(hf.get("norm_bias", False)),
        qkv_bias=bool(hf.get("attention_bias", False)),
        out_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        is_gated=True,
        head=_head(hf) if is_classifier(hf) else None,
        **of_heads(integer(hf, "hidden_size"), integer(hf, "num_attention_heads")),
    )


def _head(hf: Mapping[str, Any]) -> EncoderHead:
    return EncoderHead(
        pooling="mean" if hf.get("classifier_pooling") == "mean" else "cls",
        dense=activation(hf, "classifier_activation"),
        has_dense_bias=bool(hf.get("classifier_bias", False)),
        has_norm=True,
    )
