"""RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): BERT whose positions begin after the padding's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.models.encoder import BERT_NAMES, EncoderConfig, EncoderHead, bert_like, is_classifier
from tureen.models.reading import fault, integer, layer_number, number

ENCODER_ARCHITECTURES = (
    "RobertaModel",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification",
)
RENAMES = (
    ("roberta.", ""),
    *BERT_NAMES,
    ("classifier.dense.", "head.dense."),
    ("classifier.out_proj.", "head.out."),
)


def parse(hf: Mapping[str, Any]) -> EncoderConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    return bert_like(hf, num_token_types=integer(hf, "type_vocab_size"), **after_padding(hf))


def after_padding(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an encoder whose positions begin after the padding's. Raises StartupError when none is
    left."""
    padding, positions = layer_number(hf, "pad_token_id", 1), integer(hf, "max_position_embeddings")
    if positions <= padding + 1:
        raise fault("max_position_embeddings", f"must be more than {padding + 1}, got {positions}")
    return {
        "norm_eps": number(hf, "layer_norm_eps", 1e-12),
        "max_tokens": positions - padding - 1,
        "padding": padding,
        "head": EncoderHead(dense="tanh") if is_classifier(hf) else None,
    }
