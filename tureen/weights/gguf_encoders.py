"""Reads encoders from GGUF files: config.json as the original model has it, and the names of the weights. XLM-RoBERTa
is a `bert` there, and its positions begin at 0.

Source: llama.cpp's src/models/bert.cpp and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from tureen.errors import echo
from tureen.weights.gguf_facts import GgufFacts

TOP_NAMES: Final = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "token_types": "embed_types",
    "token_embd_norm": "embed_norm",
    "output_norm": "norm",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "head.out",
    "dense_2": "head.dense_2",
    "dense_3": "head.dense_3",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_up": "mlp.up_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODERN_BERT: Final = "modern-bert"
"""An architecture whose `ffn_up` is two matrices in one."""
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)")


def _common(facts: GgufFacts) -> dict[str, Any]:
    facts.refuse("expert_count", "a mixture of experts")
    facts.refuse("moe_every_n_layers", "a mixture of experts")
    return {
        "vocab_size": _rows(facts, "token_embd.weight"),
        "hidden_size": facts.count("embedding_length"),
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": facts.count("attention.head_count"),
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "max_position_embeddings": facts.count("context_length"),
        "eos_token_id": [],
    }


def _bert(facts: GgufFacts) -> dict[str, Any]:
    positions = _rows(facts, "position_embd.weight")
    return _common(facts) | _types(facts) | _labels(facts, "Bert") | {"max_position_embeddings": positions}


def _types(facts: GgufFacts) -> dict[str, Any]:
    return {"model_type": "bert", "type_vocab_size": _rows(facts, "token_types.weight")}


def _labels(facts: GgufFacts, family: str) -> dict[str, Any]:
    """Returns the class of the model: one that scores texts if the file has a head for that."""
    labels = facts.stored("classifier.output_labels")
    if not facts.has("cls.output.weight"):
        return {"architectures": [f"{family}Model"]}
    count = _rows(facts, "cls.output.weight")
    if not isinstance(labels, list) or len(labels) != count:
        labels = [f"LABEL_{index}" for index in range(count)]
    names = {str(index): label for index, label in enumerate(labels)}
    return {"architectures": [f"{family}ForSequenceClassification"], "id2label": names}


def _nomic_bert(facts: GgufFacts) -> dict[str, Any]:
    theta = facts.number("rope.freq_base", 1000.0)
    own = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "rope_theta": theta}
    return _common(facts) | _types(facts) | own


def _modern_bert(facts: GgufFacts) -> dict[str, Any]:
    config, layers = _common(facts), facts.count("block_count")
    slides = facts.flags("attention.sliding_window_pattern", layers)
    every = facts.count("attention.sliding_window_pattern", 3) if slides is None else 0
    slides = slides or [layer % every != 0 for layer in range(layers)]
    scaling = facts.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise facts.unsupported(f"{MODERN_BERT}.rope.scaling.type {echo(scaling)} is not supported")
    activation = facts.stored("hidden_activation")
    if not isinstance(activation, str | None):
        raise facts.fault(f"{MODERN_BERT}.hidden_activation must be a name, got {echo(activation)}")
    return (
        config
        | _labels(facts, "ModernBert")
        | {
            "model_type": "modernbert",
            "norm_eps": config["layer_norm_eps"],
            "hidden_activation": activation,
            "local_attention": facts.count("attention.sliding_window"),
            "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
            "global_rope_theta": facts.number("rope.freq_base", 10000.0),
            "local_rope_theta": facts.number("rope.freq_base_swa", 10000.0),
            "classifier_activation": "gelu",
            "classifier_bias": facts.has("cls.bias"),
            "classifier_pooling": "mean",  # as llama.cpp has it; files do not say it
        }
    )


ARCHITECTURES: Final[dict[str, Callable[[GgufFacts], dict[str, Any]]]] = {
    "bert": _bert,
    "nomic-bert": _nomic_bert,
    MODERN_BERT: _modern_bert,
}
"""Names of architectures in files -> functions that return the config.json of the original model."""


def encoder_name(name: str, architecture: str) -> str | None:
    """Returns the name that `EncoderConfig.weights` has for a tensor; None for an unknown one."""
    stem, _, kind = name.rpartition(".")
    layer = LAYER_TENSOR.fullmatch(stem)
    if layer is None:
        return f"{TOP_NAMES[stem]}.{kind}" if stem in TOP_NAMES else None
    if layer[2] == "ffn_up" and architecture == MODERN_BERT:
        return f"layers.{layer[1]}.mlp.gate_up_proj.{kind}"
    return f"layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}" if layer[2] in LAYER_NAMES else None


def _rows(facts: GgufFacts, name: str) -> int:
    tensor = facts.file.tensors.get(name)
    if tensor is None:
        raise facts.fault(f"tensor '{name}' is missing")
    return tensor.shape[0]
