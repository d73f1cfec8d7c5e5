"""The torch model of a decoder, built from its ModelConfig."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape, ModelInput, RotatingBackend
from tureen.kernels.fused import FusedKernels
from tureen.layers.attention import Attention, Step
from tureen.layers.block import Block
from tureen.layers.embedding import Embedding, Head
from tureen.layers.experts import ExpertRouter, ExpertsBeside, ExpertsMLP
from tureen.layers.kept_states import KeptStates
from tureen.layers.latent_attention import LatentAttention
from tureen.layers.layer_inputs import ResidualStreams
from tureen.layers.linear import Linear
from tureen.layers.mixers import GatedDelta, KimiDelta, Mixer, ShortConv
from tureen.layers.mlp import MLP
from tureen.layers.norm import LayerNorm, Norm, RMSNorm
from tureen.layers.recurrent import (
    Beside,
    GatedDeltaLayer,
    KimiDeltaLayer,
    Mamba2Layer,
    RecurrentLayer,
    ShortConvLayer,
)
from tureen.layers.rotary import RopeTable
from tureen.layers.routing import Experts
from tureen.layers.second_embedding import LayerInput, SecondEmbedding
from tureen.layers.stream_block import StreamBlock, StreamMaps
from tureen.models.config import BESIDE_NORMS, STREAM_MAPS, ModelConfig, qkv_names
from tureen.weights.stored import Stored
from tureen.weights.tensors import as_tensor

if TYPE_CHECKING:
    from tureen.layers.block import TokenMixer

    Part = Embedding | SecondEmbedding | StreamMaps | StreamBlock | Block | Norm | Head


class DecoderLayers:
    """Consecutive layers of a decoder. They are built on torch's default device; weights are undefined until they are
    loaded."""

    def __init__(self, config: ModelConfig, layers: range, dtype: torch.dtype) -> None:
        self.config = config
        own = [layer for layer in config.cached_layers if layer in layers]
        places = {layer: place for place, layer in enumerate(own)}  # in the attention backend
        for layer in layers:
            shared = config.keys_of(layer).of_layer
            places.setdefault(layer, -1 if shared is None else places[shared])
        self._blocks = {layer: _block(config, layer, places[layer], dtype) for layer in layers}
        self._tables: list[RopeTable] = []
        self.states: KeptStates | None = None  # of layers without attention, once there is a cache

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

    def fuse(self, kernels: FusedKernels) -> None:
        """Computes norms and activations by fused kernels from now on."""
        for block in self._blocks.values():
            if isinstance(block, Block):
                block.fuse(kernels)

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

    def _compute(
        self, x: Tensor, inputs: ModelInput, attention: AttentionBackend, layer_inputs: Tensor | None = None
    ) -> Tensor:
        """Computes the layers for x [tokens, hidden_size], which is changed in place and returned."""
        step = make_step(self.config, inputs, attention, self._tables, self.states)
        rotating = attention if isinstance(attention, RotatingBackend) else None
        step = step._replace(layer_inputs=layer_inputs, rotating=rotating)
        for index, block in self._blocks.items():
            x = block(x, step)
            if index < self.config.num_deep_inputs:
                add_deep_input(x, inputs, index)
        return x

    def _parts(self) -> Iterator[tuple[str, Part]]:
        """Yields each part with the prefix of its weights' names."""
        for index, block in self._blocks.items():
            yield f"model.layers.{index}.", block


class DecoderModel(DecoderLayers):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layers: range | None = None) -> None:
        """layers: those that are computed here; None = all."""
        super().__init__(config, range(config.num_layers) if layers is None else layers, dtype)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale)
        self._second = _second_embedding(config, dtype)
        self._maps = None
        if config.streams is not None:
            self._maps = StreamMaps(config.streams.count, STREAM_MAPS, config.hidden_size, dtype)
        self._norm = make_norm(config)
        tied = self._embedding if config.tie_embeddings else None
        self._head = Head(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            tied=tied,
            bias=config.head_bias,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """Returns hidden states [tokens, hidden_size] before the final norm. `attention.plan(inputs)` has been
        called."""
        x = self._embedding(inputs.token_ids)
        if inputs.embedded is not None:
            places, vectors = inputs.embedded
            x[places] = vectors[:, : x.shape[1]].to(x.dtype)
        layer_inputs = None if self._second is None else self._second(inputs.token_ids, x)
        if self._maps is None:
            return self._compute(x, inputs, attention, layer_inputs)
        return self._maps.end(self._compute(self._maps.begin(x), inputs, attention, layer_inputs))

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Applies the final norm to rows of `forward`'s result: float32 [rows, hidden_size]."""
        return self._norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of rows of `forward`'s result: float32 [rows, vocab_size]."""
        return self._head(self._norm(hidden))

    def weight(self, name: str) -> Tensor:
        """Returns the values of one of `config.weights()`, also after they were laid out for the device."""
        parts = (part.weights(prefix) for prefix, part in self._parts() if name.startswith(prefix))
        return next(values for weights in parts for own, values in weights if own == name)

    def fuse(self, kernels: FusedKernels) -> None:
        super().fuse(kernels)
        if isinstance(self._norm, RMSNorm):
            self._norm.fuse(kernels)

    def finish(self, context_len: int, device: torch.device) -> None:
        super().finish(context_len, device)
        self._head.finish()
        for part in (self._second, self._maps):
            if part is not None:
                part.finish()

    def _parts(self) -> Iterator[tuple[str, Part]]:
        yield "model.embed_tokens", self._embedding
        for part in (self._second, self._maps):
            if part is not None:
                yield "model.", part
        yield from super()._parts()
        yield "model.norm", self._norm
        yield "lm_head", self._head


def layer_shape(config: ModelConfig, layer: int) -> LayerShape:
    """Returns the sizes and the scale of a layer's attention."""
    keys = config.keys_of(layer)
    return LayerShape(
        config.num_heads,
        keys.num_heads,
        keys.head_dim,
        config.attention_scale,
        config.windows[layer],
        config.attention_softcap,
        config.has_sinks,
        config.sees_picture_whole(layer),
    )


def rope_tables(config: ModelConfig, context_len: int, device: torch.device) -> list[RopeTable]:
    """Makes the tables of the different ropes of the model's layers."""
    return [RopeTable(rope, size, context_len, device) for rope, size in config.rope_kinds()]


def _rope_table(config: ModelConfig, layer: int) -> int | None:
    """Returns the index of a layer's rope table; None without a rope."""
    rope = config.ropes[layer]
    return None if rope is None else config.rope_kinds().index((rope, config.rope_dim(layer)))


def _second_embedding(config: ModelConfig, dtype: torch.dtype) -> SecondEmbedding | None:
    inputs = config.layer_inputs
    if inputs is None:
        return None
    norm = _norm(config, inputs.size, bias=False)
    return SecondEmbedding(inputs, config.num_layers, config.hidden_size, norm, dtype)


def _block(config: ModelConfig, layer: int, place: int, dtype: torch.dtype) -> Block | StreamBlock:
    if config.streams is not None:
        return _stream_block(config, config.streams, layer, place, dtype)
    part = config.part_of(layer)
    mixer = None if part == "mlp" else _mixer(config, layer, place, dtype)
    experts = config.experts_of(layer)
    mlp: MLP | ExpertsMLP | ExpertsBeside | None = None
    if part != "mixer" and experts is None:
        mlp = make_mlp(config, config.mlp_size(layer), dtype, down_bias=config.mlp_bias)
    elif part != "mixer" and experts is not None:
        routers = make_routers(config, experts, dtype)
        mlp = make_experts(config, experts, dtype, *routers, down_bias=config.mlp_bias)
        if experts.are_beside:
            single = make_mlp(config, config.mlp_size(layer), dtype, down_bias=config.mlp_bias)
            norms = {name: make_norm(config) for name in BESIDE_NORMS}
            plain = RMSNorm(config.hidden_size, config.norm_eps, has_weight=False)
            mlp = ExpertsBeside(single, mlp, routers[0], norms, plain)
    return Block(
        mixer,
        mlp,
        make_norms(config, layer),
        config.norms,
        config.residual_scale,
        layer_input=_layer_input(config, layer, dtype),
        has_result_scale=config.has_layer_scales,
    )


def _stream_block(
    config: ModelConfig, streams: ResidualStreams, layer: int, place: int, dtype: torch.dtype
) -> StreamBlock:
    shape, layer_input = layer_shape(config, layer), _layer_input(config, layer, dtype)
    assert layer_input is not None, "layers with streams have a part of the second embedding"
    mlp, cutoff = make_mlp(config, config.mlp_size(layer), dtype, down_bias=config.mlp_bias), config.mlp_cutoff(layer)
    if cutoff is not None:
        mlp.cut_gates(cutoff)
    return StreamBlock(
        streams,
        config.hidden_size,
        make_attention(config, layer, shape, place=place, out_bias=config.out_bias, dtype=dtype),
        mlp,
        make_norms(config, layer),
        (make_norm(config), make_norm(config)),
        layer_input,
        dtype,
    )


def _layer_input(config: ModelConfig, layer: int, dtype: torch.dtype) -> LayerInput | None:
    if config.layer_inputs is None:
        return None
    size, norm = config.layer_inputs.size, make_norm(config)
    return LayerInput(layer, config.hidden_size, size, config.activation, norm, dtype)


def _mixer(config: ModelConfig, layer: int, place: int, dtype: torch.dtype) -> TokenMixer:
    """Makes a layer's attention, or what it has in its place. place: of the attention in its backend."""
    mixer = config.mixer_of(layer)
    if mixer is not None and not config.mixers_beside:
        return _recurrent(config, mixer, layer, dtype)
    shape = layer_shape(config, layer)
    if config.latent is not None:
        table = _rope_table(config, layer)
        return LatentAttention(config.latent, place, config.hidden_size, shape, rope=table, dtype=dtype)
    attention = make_attention(config, layer, shape, place=place, out_bias=config.out_bias, dtype=dtype)
    if mixer is None:
        return attention
    factors = config.multipliers
    return Beside(attention, _recurrent(config, mixer, layer, dtype), factors.attention_in, factors.attention_out)


def _recurrent(config: ModelConfig, mixer: Mixer, layer: int, dtype: torch.dtype) -> RecurrentLayer:
    size, start = config.hidden_size, config.state_start(layer)
    if isinstance(mixer, ShortConv):
        return ShortConvLayer(mixer, size, start, dtype)
    if isinstance(mixer, GatedDelta):
        return GatedDeltaLayer(mixer, size, start, config.norm_eps, dtype)
    if isinstance(mixer, KimiDelta):
        return KimiDeltaLayer(mixer, size, start, config.norm_eps, dtype)
    return Mamba2Layer(mixer, size, start, config.norm_eps, dtype)


def make_attention(
    config: ModelConfig, layer: int, shape: LayerShape, *, place: int, out_bias: bool, dtype: torch.dtype
) -> Attention:
    """Makes a layer's attention, of all heads or of some. place: its index in the attention backend."""
    keys = config.keys_of(layer)
    attention = Attention(
        place,
        config.hidden_size,
        shape,
        rope=_rope_table(config, layer),
        qkv_bias=config.qkv_bias,
        out_bias=out_bias,
        dtype=dtype,
        names=qkv_names(keys),
    )
    if config.has_gate:
        width = {"gate_proj": shape.num_heads * shape.head_dim}
        attention.add_gate(Linear(config.hidden_size, width, bias=False, dtype=dtype))
    if config.qk_norm:
        is_all = config.qk_norm == "all"
        sizes = [shape.head_dim * (heads if is_all else 1) for heads in (shape.num_heads, shape.num_kv_heads)]
        q_norm, k_norm = (_norm(config, size, bias=False) for size in sizes)
        own = k_norm if keys.of_layer is None else None
        attention.normalise(q_norm, own, are_together=is_all, is_last=config.qk_norm_last)
    if config.value_norm:
        attention.normalise_values(RMSNorm(shape.head_dim, config.norm_eps, has_weight=False))
    return attention


def make_step(
    config: ModelConfig,
    inputs: ModelInput,
    attention: AttentionBackend,
    tables: list[RopeTable],
    states: KeptStates | None = None,
) -> Step:
    """Returns the values that all layers share in this step."""
    rope = tuple(table.at(inputs.positions, inputs.places) for table in tables)
    if config.query_growth is None:
        return Step(attention, rope, None, inputs.spans, states)
    every, beta = config.query_growth.every, config.query_growth.beta
    grown = 1 + beta * torch.log1p((inputs.positions // every).float())
    return Step(attention, rope, grown[:, None, None], inputs.spans, states)


def add_deep_input(x: Tensor, inputs: ModelInput, layer: int) -> None:
    """Adds the layer's part of deep embeddings to x [tokens, hidden_size]. Does nothing without them."""
    if inputs.embedded is None:
        return
    places, vectors = inputs.embedded
    size = x.shape[1]
    if vectors.shape[1] > size:
        x[places] += vectors[:, (layer + 1) * size : (layer + 2) * size].to(x.dtype)


def make_norms(config: ModelConfig, layer: int) -> dict[str, Norm]:
    """Makes the norms of a layer by their names; see Block."""
    return {name: make_norm(config) for name in config.layer_norms(layer)}


def make_norm(config: ModelConfig) -> Norm:
    """Makes a norm of hidden states."""
    return _norm(config, config.hidden_size, bias=config.norm_bias)


def _norm(config: ModelConfig, size: int, *, bias: bool) -> Norm:
    return LayerNorm(size, config.norm_eps, bias=bias) if config.layer_norm else RMSNorm(size, config.norm_eps)


def make_mlp(config: ModelConfig, size: int, dtype: torch.dtype, *, down_bias: bool) -> MLP:
    """Makes an mlp of this intermediate size."""
    activation = config.activation
    return MLP(
        config.hidden_size,
        size,
        activation,
        has_gate=config.gated_mlp,
        bias=config.mlp_bias,
        down_bias=down_bias,
        dtype=dtype,
        scales=(config.multipliers.gate, config.multipliers.mlp_out),
    )


def make_routers(config: ModelConfig, experts: Experts, dtype: torch.dtype) -> tuple[ExpertRouter, Linear | None]:
    """Makes the router of a layer's experts, and the gate of the one that every token uses, if there is one."""
    router = ExpertRouter(config.hidden_size, experts, dtype)
    if not experts.shared_size or not experts.has_shared_gate:
        return router, None
    return router, Linear(config.hidden_size, {"shared_expert_gate": 1}, bias=False, dtype=dtype)


def make_experts(
    config: ModelConfig,
    experts: Experts,
    dtype: torch.dtype,
    router: ExpertRouter,
    shared_gate: Linear | None,
    *,
    down_bias: bool,
) -> ExpertsMLP:
    """Makes a layer's experts, whose weights the router and the gate give."""
    plain = [make_mlp(config, experts.size, dtype, down_bias=down_bias) for _ in range(experts.count)]
    shared = None
    if experts.shared_size:
        shared = make_mlp(config, experts.shared_size, dtype, down_bias=down_bias)
    return ExpertsMLP(router, plain, shared, shared_gate)
