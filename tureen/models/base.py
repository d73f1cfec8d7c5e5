"""The frame every decoder-only model stands in: embedding, blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tureen.layers.attention import Attention, AttentionBackend, LayerShape, ModelInput, Step
from tureen.layers.block import PreNormBlock
from tureen.layers.embedding import Embedding, Head
from tureen.layers.mlp import GatedMLP
from tureen.layers.norm import RMSNorm
from tureen.layers.rotary import RopeTable
from tureen.models.config import ModelConfig

RENAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of checkpoint names -> what they are called here; for language models inside larger ones."""
IGNORED = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
"""Prefixes of a checkpoint's weights that a text model has no use for."""


class Block(Protocol):
    """One layer of the decoder."""

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, hidden_size] -> the same shape; may change x in place."""

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name -> the tensor its values go into."""

    def finish(self) -> None:
        """Called once, when all weights are there."""


class DecoderModel:
    """A decoder-only language model. Built on torch's default device; weights are undefined until they are loaded."""

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        self.config = config
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale)
        self._blocks = tuple(blocks)
        self._norm = norm(config, config.hidden_size)
        tied = self._embedding if config.tie_embeddings else None
        self._head = Head(config.vocab_size, config.hidden_size, dtype=dtype, tied=tied)
        self._tables: list[RopeTable] = []

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """-> hidden states [tokens, hidden_size] before the final norm. `attention.plan(inputs)` has been called."""
        step = Step(attention, tuple(table.at(inputs.positions) for table in self._tables))
        x = self._embedding(inputs.token_ids)
        if inputs.embedded is not None:
            places, vectors = inputs.embedded
            x[places] = vectors.to(x.dtype)
        for block in self._blocks:
            x = block(x, step)
        return x

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result -> float32 [rows, hidden_size] after the final norm."""
        return self._norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result -> float32 [rows, vocab_size]."""
        return self._head(self._norm(hidden))

    def weights(self) -> dict[str, Tensor]:
        """Every checkpoint name -> the tensor its values go into."""
        named = dict(self._embedding.weights("model.embed_tokens"))
        for index, block in enumerate(self._blocks):
            named |= block.weights(f"model.layers.{index}.")
        return named | dict(self._norm.weights("model.norm")) | dict(self._head.weights("lm_head"))

    def finish(self, context_len: int, device: torch.device) -> None:
        """All weights are there: lay them out for the device, make the rope tables."""
        for block in self._blocks:
            block.finish()
        self._norm.finish()
        self._head.finish()
        ropes = dict.fromkeys(self.config.ropes)
        self._tables = [RopeTable(rope, self.config.head_dim, context_len, device) for rope in ropes]


def layer_shape(config: ModelConfig, layer: int) -> LayerShape:
    return LayerShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, config.windows[layer]
    )


def norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, unit_offset=config.unit_offset_norm)


def attention(config: ModelConfig, layer: int, dtype: torch.dtype) -> Attention:
    part = Attention(
        layer,
        config.hidden_size,
        layer_shape(config, layer),
        rope=list(dict.fromkeys(config.ropes)).index(config.ropes[layer]),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        dtype=dtype,
    )
    if config.qk_norm:
        part.normalise_heads(norm(config, config.head_dim), norm(config, config.head_dim))
    return part


def mlp(config: ModelConfig, dtype: torch.dtype) -> GatedMLP:
    return GatedMLP(config.hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias, dtype=dtype)


def pre_norm_decoder(config: ModelConfig, dtype: torch.dtype) -> DecoderModel:
    """A model of blocks with one norm before the attention and one before the feed-forward part."""
    hidden = config.hidden_size
    blocks = [
        PreNormBlock(
            norm(config, hidden),
            attention(config, layer, dtype),
            norm(config, hidden),
            mlp(config, dtype),
        )
        for layer in range(config.num_layers)
    ]
    return DecoderModel(config, blocks, dtype)
