"""BERT (arXiv:1810.04805) that makes embeddings of texts, as sentence-transformers (arXiv:1908.10084) trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tureen.errors import StartupError, echo
from tureen.models.config import number

EMBEDDING_ARCHITECTURES = ("BertModel",)
LAYER_PARTS = {
    "attention.self.query": ("hidden", "hidden"),
    "attention.self.key": ("hidden", "hidden"),
    "attention.self.value": ("hidden", "hidden"),
    "attention.output.dense": ("hidden", "hidden"),
    "intermediate.dense": ("inner", "hidden"),
    "output.dense": ("hidden", "inner"),
}
"""The matrices of a layer: the sizes of their outputs and inputs. Each has a bias."""
UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
"""Beginnings of names in checkpoints that are not used: heads for training, and a list of numbers that needs no
file."""


class BertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an encoder in which every token sees all others; each layer's norms follow what they norm."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_token_types: int
    norm_eps: float

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each weight by its Hugging Face name. A matrix is [outputs, inputs]."""
        hidden = self.hidden_size
        sizes = {"hidden": hidden, "inner": self.intermediate_size}
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.num_positions, hidden),
            "embeddings.token_type_embeddings.weight": (self.num_token_types, hidden),
        }
        norms = ["embeddings.LayerNorm"]
        for layer in range(self.num_layers):
            prefix = f"encoder.layer.{layer}"
            for part, (outputs, inputs) in LAYER_PARTS.items():
                shapes[f"{prefix}.{part}.weight"] = (sizes[outputs], sizes[inputs])
                shapes[f"{prefix}.{part}.bias"] = (sizes[outputs],)
            norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]
        return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


def parse(hf: Mapping[str, Any]) -> BertConfig:
    """Reads config.json. Raises StartupError naming the field that is missing or not supported."""
    expected = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    for name, value in expected.items():
        if hf.get(name, value) != value:
            raise StartupError(f"config.json: {name}: must be {echo(value)}, got {echo(hf[name])}", field=name)
    config = BertConfig(
        vocab_size=_count(hf, "vocab_size"),
        hidden_size=_count(hf, "hidden_size"),
        intermediate_size=_count(hf, "intermediate_size"),
        num_layers=_count(hf, "num_hidden_layers"),
        num_heads=_count(hf, "num_attention_heads"),
        num_positions=_count(hf, "max_position_embeddings"),
        num_token_types=_count(hf, "type_vocab_size"),
        norm_eps=number(hf, "layer_norm_eps", 1e-12),
    )
    if config.hidden_size % config.num_heads:
        raise StartupError(
            f"config.json: hidden_size {config.hidden_size} cannot be shared by {config.num_heads} heads",
            field="num_attention_heads",
        )
    return config


def _count(hf: Mapping[str, Any], name: str) -> int:
    value = hf.get(name)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"config.json: {name}: must be a number from 1 on, got {echo(value)}", field=name)
    return value
