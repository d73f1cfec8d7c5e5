"""Nomic BERT (arXiv:2402.01613): BERT with rotated positions and a gated mlp without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models.encoder import BERT_NAMES, EncoderConfig, activation, expect, of_heads, of_layers
from tureen.models.reading import integer, number
from tureen.models.ropes import rope

ENCODER_ARCHITECTURES = ("NomicBertModel",)
RENAMES = (
    ("nomic_bert.", ""),
    ("encoder.layers.", "layers."),
    ("emb_ln.", "embed_norm."),
    ("attn.Wqkv.", "self_attn.qkv_proj."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
    (".norm1.", ".post_attention_layernorm."),
    (".norm2.", ".post_feedforward_layernorm."),
    ("post_mlp_layernorm.", "post_feedforward_layernorm."),
    *BERT_NAMES,
)
NEWER = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
"""Keys in Nomic's own files -> their names in transformers. A later line wins."""
THETA = 1000.0


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    expect(
        hf,
        activation_function="swiglu",
        prenorm=False,
        causal=False,
        parallel_block=False,
        use_rms_norm=False,
        qkv_proj_bias=False,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        scale_attn_weights=True,
        num_experts=0,
        moe_every_n_layers=0,
    )
    hf = {**hf, **{newer: hf[older] for older, newer in NEWER.items() if hf.get(older) is not None}}
    turns = rope({}, hf.get("rope_parameters") or {}, theta=number(hf, "rope_theta", THETA))
    return EncoderConfig(
        vocab_size=integer(hf, "vocab_size"),
        intermediate_size=integer(hf, "intermediate_size"),
        norm_eps=number(hf, "layer_norm_eps", 1e-12),
        max_tokens=integer(hf, "max_position_embeddings"),
        activation=activation({"hidden_act": hf.get("hidden_act", "silu")}, "hidden_act"),
        num_token_types=integer(hf, "type_vocab_size"),
        has_pair_types=True,
        post_norms=True,
        norms_follow_sum=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        is_gated=True,
        **of_heads(integer(hf, "hidden_size"), integer(hf, "num_attention_heads")),
        **of_layers(integer(hf, "num_hidden_layers"), turns),
    )
