"""BERT (arXiv:1810.04805), as an embedding model (arXiv:1908.10084) or a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models.encoder import BERT_NAMES, EncoderConfig, EncoderHead, bert_like, is_classifier
from tureen.models.reading import integer, number

ENCODER_ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
RENAMES = (("bert.", ""), *BERT_NAMES, ("pooler.dense.", "head.dense."), ("classifier.", "head.out."))


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    return bert_like(
        hf,
        norm_eps=number(hf, "layer_norm_eps", 1e-12),
        num_token_types=integer(hf, "type_vocab_size"),
        has_pair_types=True,
        head=EncoderHead(dense="tanh") if is_classifier(hf) else None,
    )
