"""The torch model of a decoder, built from its ModelConfig."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape, ModelInput
from tureen.layers.attention import Attention, Step
from tureen.layers.block import Block
from tureen.layers.embedding import Embedding, Head
from tureen.layers.experts import ExpertsMLP
from tureen.layers.linear import Linear
from tureen.layers.mlp import GatedMLP
from tureen.layers.norm import RMSNorm
from tureen.layers.rope import RopeConfig
from tureen.layers.rotary import RopeTable
from tureen.models.config import Experts, ModelConfig
from tureen.weights.stored import Stored
from tureen.weights.tensors import as_tensor


class DecoderLayers:
    """Consecutive layers of a decoder. They are built on torch's default device; weights are undefined until they are
    loaded."""

    def __init__(self, config: ModelConfig, layers: range, dtype: torch.dtype) -> None:
        self.config = config
        self._blocks = {layer: _block(config, layer, place, dtype) for place, layer in enumerate(layers)}
        self._tables: list[RopeTable] = []

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensor that its values go into for every name in `config.weights()` that is here."""
        return {name: tensor for prefix, part in self._parts() for name, tensor in part.weights(prefix)}

    def num_bytes(self) -> int:
        """Returns the bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.weights().values())

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        for index, block in self._blocks.items():
            yield from block.linears(f"model.layers.{index}.")

    def experts(self) -> list[ExpertsMLP]:
        """Returns the mlps that are made of experts, in the order of their layers."""
        return [block.experts for block in self._blocks.values() if block.experts is not None]

    def load(self, weights: Iterable[Stored]) -> None:
        """Copies each weight that is wanted here to its place."""
        places = self.weights()
        for stored in weights:
            if stored.name in places:
                places[stored.name].copy_(as_tensor(stored))

    def finish(self, context_len: int, device: torch.device) -> None:
        """Lays the weights out for the device and makes the rope tables, once all weights are there."""
        for block in self._blocks.values():
            block.finish()
        self._tables = rope_tables(self.config, context_len, device)

    def _compute(self, x: Tensor, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """Computes the layers for x [tokens, hidden_size], which is changed in place and returned."""
        step = Step(attention, tuple(table.at(inputs.positions) for table in self._tables))
        for block in self._blocks.values():
            x = block(x, step)
        return x

    def _parts(self) -> Iterator[tuple[str, Embedding | Block | RMSNorm | Head]]:
        """Yields each part with the prefix of its weights' names."""
        for index, block in self._blocks.items():
            yield f"model.layers.{index}.", block


class DecoderModel(DecoderLayers):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layers: range | None = None) -> None:
        """layers: those that are computed here; None = all."""
        super().__init__(config, range(config.num_layers) if layers is None else layers, dtype)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale)
        self._norm = RMSNorm(config.hidden_size, config.norm_eps)
        tied = self._embedding if config.tie_embeddings else None
        self._head = Head(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            tied=tied,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """Returns hidden states [tokens, hidden_size] before the final norm. `attention.plan(inputs)` has been
        called."""
        x = self._embedding(inputs.token_ids)
        if inputs.embedded is not None:
            places, vectors = inputs.embedded
            x[places] = vectors.to(x.dtype)
        return self._compute(x, inputs, attention)

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Applies the final norm to rows of `forward`'s result: float32 [rows, hidden_size]."""
        return self._norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of rows of `forward`'s result: float32 [rows, vocab_size]."""
        return self._head(self._norm(hidden))

    def weight(self, name: str) -> Tensor:
        """Returns the values of one of `config.weights()`, also after they were laid out for the device."""
        return next(dict(part.weights(prefix))[name] for prefix, part in self._parts() if name.startswith(prefix))

    def finish(self, context_len: int, device: torch.device) -> None:
        super().finish(context_len, device)
        self._head.finish()

    def _parts(self) -> Iterator[tuple[str, Embedding | Block | RMSNorm | Head]]:
        yield "model.embed_tokens", self._embedding
        yield from super()._parts()
        yield "model.norm", self._norm
        yield "lm_head", self._head


def layer_shape(config: ModelConfig, layer: int) -> LayerShape:
    """Returns the sizes and the scale of a layer's attention."""
    return LayerShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.attention_scale,
        config.windows[layer],
        config.attention_softcap,
    )


def rope_tables(config: ModelConfig, context_len: int, device: torch.device) -> list[RopeTable]:
    """Makes the tables of the different ropes of the model's layers."""
    return [RopeTable(rope, config.head_dim, context_len, device) for rope in _ropes(config)]


def _ropes(config: ModelConfig) -> list[RopeConfig]:
    """Returns the different ropes of the model's layers, each once."""
    return [rope for rope in dict.fromkeys(config.ropes) if rope is not None]


def _block(config: ModelConfig, layer: int, place: int, dtype: torch.dtype) -> Block:
    attention = make_attention(
        config, layer, layer_shape(config, layer), place=place, out_bias=config.out_bias, dtype=dtype
    )
    experts = config.experts_of(layer)
    mlp: GatedMLP | ExpertsMLP
    if experts is None:
        mlp = make_mlp(config, config.intermediate_size, dtype, down_bias=config.mlp_bias)
    else:
        mlp = make_experts(config, experts, dtype, *make_routers(config, experts, dtype))
    return Block(attention, mlp, make_norms(config), config.residual_scale)


def make_attention(
    config: ModelConfig, layer: int, shape: LayerShape, *, place: int, out_bias: bool, dtype: torch.dtype
) -> Attention:
    """Makes a layer's attention, of all heads or of some. place: its index in the attention backend."""
    rope = config.ropes[layer]
    attention = Attention(
        place,
        config.hidden_size,
        shape,
        rope=None if rope is None else _ropes(config).index(rope),
        qkv_bias=config.qkv_bias,
        out_bias=out_bias,
        dtype=dtype,
    )
    if config.qk_norm:
        attention.normalise_heads(*(RMSNorm(config.head_dim, config.norm_eps) for _ in range(2)))
    return attention


def make_norms(config: ModelConfig) -> dict[str, RMSNorm]:
    """Makes the norms of a layer by their names; see Block."""
    return {name: RMSNorm(config.hidden_size, config.norm_eps) for name in config.layer_norms}


def make_mlp(config: ModelConfig, size: int, dtype: torch.dtype, *, down_bias: bool) -> GatedMLP:
    """Makes an mlp of this intermediate size."""
    activation = config.activation
    return GatedMLP(config.hidden_size, size, activation, bias=config.mlp_bias, down_bias=down_bias, dtype=dtype)


def make_routers(config: ModelConfig, experts: Experts, dtype: torch.dtype) -> tuple[Linear, Linear | None]:
    """Makes the router of a layer's experts, and the gate of the one that every token uses, if there is one."""
    router = Linear(config.hidden_size, {"gate": experts.count}, bias=False, dtype=dtype)
    if not experts.shared_size:
        return router, None
    return router, Linear(config.hidden_size, {"shared_expert_gate": 1}, bias=False, dtype=dtype)


def make_experts(
    config: ModelConfig, experts: Experts, dtype: torch.dtype, router: Linear, shared_gate: Linear | None
) -> ExpertsMLP:
    """Makes a layer's experts, whose weights the router and the gate give."""
    plain = [make_mlp(config, experts.size, dtype, down_bias=config.mlp_bias) for _ in range(experts.count)]
    shared = None
    if shared_gate is not None:
        shared = make_mlp(config, experts.shared_size, dtype, down_bias=config.mlp_bias), shared_gate
    return ExpertsMLP(router, plain, num_chosen=experts.num_chosen, is_normalised=experts.is_normalised, shared=shared)
