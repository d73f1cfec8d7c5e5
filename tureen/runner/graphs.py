"""The forward pass as a tape: the operations of a decoder are recorded once, and replayed with one native call.

A tape holds for any number of rows and tokens; only a step's numbers are handed over. What runs between two steps is
Python, what runs within one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.contract.runner import Batch, Row
from tureen.contract.types import NO_TOKEN
from tureen.layers.rope import frequencies
from tureen.lora.adapter import Adapter
from tureen.models.config import ModelConfig
from tureen.runner.forward import ForwardOutput, drawn_tokens, hidden_ranges, score_pieces
from tureen.runner.trace import StepTrace, TraceOptions
from tureen.sampling.arithmetic import Peaks

Floats = NDArray[np.float32]
NOTHING = np.empty(0, np.float32)


class TapeForward:
    """A recorded decoder on the CPU: a Forward. `dtype`: the type in which most of its weights are stored."""

    device_name = "cpu"

    def __init__(self, tape: Any, dtype: str, activations: str, vocab_size: int) -> None:
        self.dtype = dtype
        self.activations = activations
        self._tape = tape
        self._vocab_size = vocab_size

    @property
    def seconds(self) -> float:
        """Seconds spent in native code so far."""
        spent: float = self._tape.seconds
        return spent

    @property
    def threads(self) -> int:
        """The number of threads that shared the last step."""
        shared: int = self._tape.threads
        return shared

    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        embedded = [row for row in batch.rows if row.embeds]
        self._tape.run(batch.rows, _embedded(embedded) if embedded else None)
        extras = any(row.score_targets or row.hidden_from is not None for row in batch.rows)
        if best_only and not extras:
            return ForwardOutput(best=self._tape.best())
        hidden = tuple(self._tape.last_hidden(list(tokens)) for tokens in hidden_ranges(batch)) if extras else ()
        pieces = score_pieces(batch, self._vocab_size) if extras else []
        scored = (self._tape.score(list(piece)) for piece in pieces)
        if best_only:
            return ForwardOutput(best=self._tape.best(), scored=scored, hidden=hidden)
        if any(row.num_drafts for row in batch.rows):
            logits = self._tape.score(drawn_tokens(batch))
            peaks = None
        else:
            logits, values, token_ids = self._tape.sampled()
            peaks = Peaks(values, token_ids)
        if pieces:
            logits = logits.copy()  # the tape's memory is written again for each piece
        return ForwardOutput((), logits, peaks, scored, hidden)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        for module, factors in adapter.items():
            self._tape.load_adapter(number, module, *map(np.ascontiguousarray, factors))

    def unload_adapter(self, number: int) -> None:
        self._tape.unload_adapter(number)

    def count_experts(self, *, is_on: bool) -> None:
        self._tape.count_experts(is_on)

    def take_expert_counts(self) -> list[list[int]]:
        counts: list[list[int]] = self._tape.take_expert_counts()
        return counts

    def start_trace(self, options: TraceOptions) -> StepTrace:
        return StepTrace(options, lambda: self.seconds)


def _embedded(rows: list[Row]) -> Floats:
    """Returns the embeddings that stand in place of tokens, float32 [count, hidden_size], in the order of the step's
    tokens."""
    counts = [sum(token == NO_TOKEN for token in row.token_ids) for row in rows]
    values = [np.frombuffer(row.embeds, np.float32) for row in rows]
    return np.concatenate([value.reshape(count, -1) for value, count in zip(values, counts, strict=True)])


def record(tape: Any, config: ModelConfig, context_len: int, weights: Mapping[str, Any]) -> None:
    """Records the decoder that `config` describes on the tape.

    weights: checkpoint name -> packed matrix, or float32 [n].
    """
    embedding = weights["model.embed_tokens.weight"]
    tape.embed(embedding, 1.0 if config.embedding_scale is None else config.embedding_scale)
    for layer in range(config.num_layers):
        own = _Part(weights, f"model.layers.{layer}.")
        _record_attention(tape, config, layer, context_len, own)
        _record_mlp(tape, config, layer, own)
    head = embedding if config.tie_embeddings else weights["lm_head.weight"]
    tape.head(
        norm=weights["model.norm.weight"],
        eps=config.norm_eps,
        matrix=head,
        scale=config.logit_scale,
        softcap=config.logit_softcap or 0.0,
    )


class _Part:
    """The weights under one prefix."""

    def __init__(self, weights: Mapping[str, Any], prefix: str) -> None:
        self._weights = weights
        self.prefix = prefix

    def __getitem__(self, name: str) -> Any:
        return self._weights[self.prefix + name]

    def floats(self, *names: str, is_there: bool = True) -> Floats:
        """Returns vectors one after another; none where `is_there` is false."""
        return np.concatenate([self[name] for name in names]) if is_there else NOTHING

    def gated(self, name: str, config: ModelConfig) -> tuple[Any, ...]:
        """Returns an mlp as the tape takes it: its activation, then weight and bias of gate, up and down."""
        parts = [f"{name}.{part}_proj" for part in ("gate", "up", "down")]
        pairs = [(self[f"{part}.weight"], self.floats(f"{part}.bias", is_there=config.mlp_bias)) for part in parts]
        return config.activation, *(weight for pair in pairs for weight in pair)


def _record_attention(tape: Any, config: ModelConfig, layer: int, context_len: int, own: _Part) -> None:
    rope = config.ropes[layer]
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    tape.attention(
        module=f"{own.prefix}self_attn",
        layer=layer,
        norm=own["input_layernorm.weight"],
        eps=config.norm_eps,
        qkv=[own[f"{name}.weight"] for name in names],
        qkv_bias=own.floats(*(f"{name}.bias" for name in names), is_there=config.qkv_bias),
        q_norm=own.floats("self_attn.q_norm.weight", is_there=config.qk_norm),
        k_norm=own.floats("self_attn.k_norm.weight", is_there=config.qk_norm),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
        window=config.windows[layer] or 0,
        frequencies=NOTHING if rope is None else frequencies(rope, config.head_dim, context_len),
        magnitude=1.0 if rope is None else rope.magnitude,
        out=own["self_attn.o_proj.weight"],
        out_bias=own.floats("self_attn.o_proj.bias", is_there=config.out_bias),
        post=own.floats("post_attention_layernorm.weight", is_there=config.post_norms),
        residual_scale=config.residual_scale,
    )


def _record_mlp(tape: Any, config: ModelConfig, layer: int, own: _Part) -> None:
    norm = own["pre_feedforward_layernorm.weight" if config.post_norms else "post_attention_layernorm.weight"]
    experts = config.experts_of(layer)
    if experts is None:
        tape.mlp(
            module=f"{own.prefix}mlp",
            norm=norm,
            eps=config.norm_eps,
            gated=own.gated("mlp", config),
            post=own.floats("post_feedforward_layernorm.weight", is_there=config.post_norms),
            residual_scale=config.residual_scale,
        )
        return
    has_shared = experts.shared_size > 0
    tape.experts(
        module=f"{own.prefix}mlp",
        norm=norm,
        eps=config.norm_eps,
        router=own["mlp.gate.weight"],
        each=[own.gated(f"mlp.experts.{index}", config) for index in range(experts.count)],
        num_chosen=experts.num_chosen,
        is_normalised=experts.is_normalised,
        shared=[own.gated("mlp.shared_expert", config)] if has_shared else [],
        shared_gate=own["mlp.shared_expert_gate.weight"] if has_shared else None,
        residual_scale=config.residual_scale,
    )
