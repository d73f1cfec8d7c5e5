"""The torch model that a ModelConfig describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape, ModelInput
from tureen.layers.attention import Attention, Step
from tureen.layers.block import Block
from tureen.layers.embedding import Embedding, Head
from tureen.layers.mlp import GatedMLP
from tureen.layers.norm import RMSNorm
from tureen.layers.rotary import RopeTable
from tureen.models.config import ModelConfig
from tureen.weights.stored import Stored
from tureen.weights.tensors import as_tensor


class DecoderModel:
    """A decoder-only language model. Built on torch's default device; weights are undefined until they are loaded."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale)
        self._blocks = [_block(config, layer, dtype) for layer in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.norm_eps)
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
        """Every name in `config.weights()` -> the tensor its values go into."""
        named = dict(self._embedding.weights("model.embed_tokens"))
        for index, block in enumerate(self._blocks):
            named |= block.weights(f"model.layers.{index}.")
        return named | dict(self._norm.weights("model.norm")) | dict(self._head.weights("lm_head"))

    def load(self, weights: Iterable[Stored]) -> None:
        """Copy each weight to its place."""
        places = self.weights()
        for stored in weights:
            places[stored.name].copy_(as_tensor(stored))

    def finish(self, context_len: int, device: torch.device) -> None:
        """All weights are there: lay them out for the device, make the rope tables."""
        for block in self._blocks:
            block.finish()
        self._head.finish()
        ropes = dict.fromkeys(self.config.ropes)
        self._tables = [RopeTable(rope, self.config.head_dim, context_len, device) for rope in ropes]


def layer_shape(config: ModelConfig, layer: int) -> LayerShape:
    return LayerShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, config.windows[layer]
    )


def _block(config: ModelConfig, layer: int, dtype: torch.dtype) -> Block:
    attention = Attention(
        layer,
        config.hidden_size,
        layer_shape(config, layer),
        rope=list(dict.fromkeys(config.ropes)).index(config.ropes[layer]),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        dtype=dtype,
    )
    if config.qk_norm:
        attention.normalise_heads(*(RMSNorm(config.head_dim, config.norm_eps) for _ in range(2)))
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias, dtype=dtype)
    return Block(attention, mlp, {name: RMSNorm(config.hidden_size, config.norm_eps) for name in config.layer_norms})
