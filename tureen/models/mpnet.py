"""MPNet (arXiv:2004.09297): RoBERTa without token types, whose scores have a bias by the distance of two tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models import roberta
from tureen.models.encoder import BERT_NAMES, EncoderConfig, bert_like
from tureen.models.reading import integer

ENCODER_ARCHITECTURES = ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification")
RENAMES = (
    ("mpnet.", ""),
    ("attention.attn.q.", "self_attn.q_proj."),
    ("attention.attn.k.", "self_attn.k_proj."),
    ("attention.attn.v.", "self_attn.v_proj."),
    ("attention.attn.o.", "self_attn.o_proj."),
    ("attention.LayerNorm.", "post_attention_layernorm."),
    ("encoder.relative_attention_bias.", "relative_bias."),
    *BERT_NAMES,
    ("classifier.dense.", "head.dense."),
    ("classifier.out_proj.", "head.out."),
)
PADDING = 1


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    return bert_like(
        hf,
        num_buckets=integer(hf, "relative_attention_num_buckets", 32),
        **roberta.after_padding({**hf, "pad_token_id": PADDING}),
    )
