"""The forward pass as a tape: the operations of a decoder are recorded once, and replayed with one native call.

A tape holds for any number of rows and tokens; only a step's numbers are handed over. What runs between two steps is
Python, what runs within one is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.layers.rope import frequencies
from tureen.models.config import ModelConfig
from tureen.runner.base import Batch
from tureen.types import NO_TOKEN

Floats = NDArray[np.float32]
NOTHING = np.empty(0, np.float32)


class TapeForward:
    """A recorded decoder on the CPU. `dtype`: what most of its weights are stored in."""

    device_name = "cpu"

    def __init__(self, tape: Any, dtype: str) -> None:
        self.dtype = dtype
        self._tape = tape

    @property
    def seconds(self) -> float:
        """Spent in native code so far."""
        spent: float = self._tape.seconds
        return spent

    def run(self, batch: Batch) -> Floats | None:
        rows = batch.rows
        sampled: list[int] = []
        end = 0
        for row in rows:
            end += len(row.token_ids)
            if row.sample:
                sampled.append(end - 1)
        logits: Floats = self._tape.run(
            [(row.token_ids, row.start, row.pages) for row in rows], sampled, _embedded(batch)
        )
        return logits if sampled else None

    def logits(self, tokens: Sequence[int]) -> Floats:
        logits: Floats = self._tape.score(list(tokens))
        return logits

    def last_hidden(self, tokens: Sequence[int]) -> Floats:
        states: Floats = self._tape.last_hidden(list(tokens))
        return states

    def are_finite(self, logits: Floats) -> bool:
        return bool(np.isfinite(logits).all())

    def keep(self, logits: Floats) -> Floats:
        return logits.copy()


def _embedded(batch: Batch) -> Floats | None:
    """float32 [tokens that are given as embeddings, hidden_size], in the order of the step's tokens."""
    given = [row for row in batch.rows if row.embeds]
    if not given:
        return None
    counts = [sum(token == NO_TOKEN for token in row.token_ids) for row in given]
    values = [np.frombuffer(row.embeds, np.float32) for row in given]
    return np.concatenate([value.reshape(count, -1) for value, count in zip(values, counts, strict=True)])


def record(tape: Any, config: ModelConfig, weights: Mapping[str, Any]) -> None:
    """Record the decoder that `config` describes. weights: checkpoint name -> packed matrix, or float32 [n]."""
    embedding = weights["model.embed_tokens.weight"]
    tape.embed(embedding, 1.0 if config.embedding_scale is None else config.embedding_scale)
    for layer in range(config.num_layers):
        own = _Part(weights, f"model.layers.{layer}.")
        _record_attention(tape, config, layer, own)
        _record_mlp(tape, config, own)
    head = embedding if config.tie_embeddings else weights["lm_head.weight"]
    tape.head(norm=weights["model.norm.weight"], eps=config.norm_eps, matrix=head)


class _Part:
    """The weights under one prefix."""

    def __init__(self, weights: Mapping[str, Any], prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, name: str) -> Any:
        return self._weights[self._prefix + name]

    def floats(self, *names: str, wanted: bool = True) -> Floats:
        """Vectors one after another; none where they are not wanted."""
        return np.concatenate([self[name] for name in names]) if wanted else NOTHING


def _record_attention(tape: Any, config: ModelConfig, layer: int, own: _Part) -> None:
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    tape.attention(
        layer=layer,
        norm=own["input_layernorm.weight"],
        eps=config.norm_eps,
        qkv=[own[f"{name}.weight"] for name in names],
        qkv_bias=own.floats(*(f"{name}.bias" for name in names), wanted=config.qkv_bias),
        q_norm=own.floats("self_attn.q_norm.weight", wanted=config.qk_norm),
        k_norm=own.floats("self_attn.k_norm.weight", wanted=config.qk_norm),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.windows[layer] or 0,
        frequencies=frequencies(config.ropes[layer], config.head_dim),
        out=own["self_attn.o_proj.weight"],
        out_bias=own.floats("self_attn.o_proj.bias", wanted=config.out_bias),
        post=own.floats("post_attention_layernorm.weight", wanted=config.post_norms),
    )


def _record_mlp(tape: Any, config: ModelConfig, own: _Part) -> None:
    tape.mlp(
        norm=own["pre_feedforward_layernorm.weight" if config.post_norms else "post_attention_layernorm.weight"],
        eps=config.norm_eps,
        gate=own["mlp.gate_proj.weight"],
        gate_bias=own.floats("mlp.gate_proj.bias", wanted=config.mlp_bias),
        up=own["mlp.up_proj.weight"],
        up_bias=own.floats("mlp.up_proj.bias", wanted=config.mlp_bias),
        activation=config.activation,
        down=own["mlp.down_proj.weight"],
        down_bias=own.floats("mlp.down_proj.bias", wanted=config.mlp_bias),
        post=own.floats("post_feedforward_layernorm.weight", wanted=config.post_norms),
    )
