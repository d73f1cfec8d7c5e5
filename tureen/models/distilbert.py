"""DistilBERT (arXiv:1910.01108): BERT with half of the layers and without token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models.encoder import BERT_NAMES, EncoderConfig, EncoderHead, bert_like, is_classifier

ENCODER_ARCHITECTURES = ("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification")
RENAMES = (
    ("distilbert.", ""),
    ("transformer.layer.", "layers."),
    ("attention.q_lin.", "self_attn.q_proj."),
    ("attention.k_lin.", "self_attn.k_proj."),
    ("attention.v_lin.", "self_attn.v_proj."),
    ("attention.out_lin.", "self_attn.o_proj."),
    ("sa_layer_norm.", "post_attention_layernorm."),
    ("output_layer_norm.", "post_feedforward_layernorm."),
    ("ffn.lin1.", "mlp.up_proj."),
    ("ffn.lin2.", "mlp.down_proj."),
    *BERT_NAMES,
    ("pre_classifier.", "head.dense."),
    ("classifier.", "head.out."),
)
NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}
"""Keys in its config.json -> BERT's."""
NORM_EPS = 1e-12


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field, by BERT's name, that is missing or not supported."""
    head = EncoderHead(dense="relu") if is_classifier(hf) else None
    return bert_like({**hf, **{ours: hf.get(own) for own, ours in NAMES.items()}}, norm_eps=NORM_EPS, head=head)
