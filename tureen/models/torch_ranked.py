"""The part of a decoder's torch model that one rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, LayerShape, ModelInput
from tureen.devices.groups import RankGroup
from tureen.layers.block import Block
from tureen.layers.embedding import Embedding
from tureen.layers.experts import ExpertsMLP
from tureen.layers.linear import Linear
from tureen.layers.rotary import RopeTable
from tureen.layers.segments import SegmentHead, SegmentLayer, Segments
from tureen.models.config import ModelConfig
from tureen.models.segments import NUM_SEGMENTS, Segment, cut, segments_of, share
from tureen.models.torch_decoder import (
    add_deep_input,
    layer_shape,
    make_attention,
    make_experts,
    make_mlp,
    make_norm,
    make_norms,
    make_routers,
    make_step,
    rope_tables,
)
from tureen.weights.stored import Stored
from tureen.weights.tensors import as_tensor

WHOLE = (slice(None),)


class WeightPart(NamedTuple):
    """A tensor of this rank, and the index of the part of a weight that goes into it."""

    tensor: Tensor
    cut: tuple[slice, ...]


class AttentionPlace(NamedTuple):
    """A segment's attention in one layer, as the attention backend counts them: places with equal `stored` share keys
    and values."""

    shape: LayerShape
    stored: tuple[int, range]  # the layer, and its heads of keys


class RankedDecoder:
    """A rank's segments of a decoder, with what every rank has: the embedding, norms, routers. See DecoderModel.

    It is built on torch's default device; weights are undefined until they are loaded.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: RankGroup) -> None:
        self.config = config
        self.segments = segments_of(config, group.rank, group.size)
        self._dtype = dtype
        self._group = group
        self._places = attention_places(config, self.segments)
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale)
        self._layers = [(self._attention(layer), self._mlp(layer)) for layer in range(config.num_layers)]
        self._blocks = [
            Block(attention, mlp, make_norms(config, layer), config.norms, config.residual_scale)
            for layer, (attention, mlp) in enumerate(self._layers)
        ]
        self._norm = make_norm(config)
        self._head = SegmentHead(
            config.hidden_size,
            [len(share(config.vocab_size, index)) for index in range(NUM_SEGMENTS)],
            group,
            dtype=dtype,
            tied=self._embedding if config.tie_embeddings else None,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )
        self._tables: list[RopeTable] = []

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """Returns hidden states [tokens, hidden_size] before the final norm, on every rank the same.
        `attention.plan(inputs)` has been called."""
        step = make_step(self.config, inputs, attention, self._tables)
        x = self._embedding(inputs.token_ids)
        if inputs.embedded is not None:
            places, vectors = inputs.embedded
            x[places] = vectors[:, : x.shape[1]].to(x.dtype)
        for index, block in enumerate(self._blocks):
            x = block(x, step)
            if index < self.config.num_deep_inputs:
                add_deep_input(x, inputs, index)
        return x

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Applies the final norm to rows of `forward`'s result: float32 [rows, hidden_size]."""
        return self._norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of rows of `forward`'s result: float32 [rows, vocab_size] on rank 0, else no rows."""
        return self._head(self._norm(hidden))

    def shares(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the name of each weight with the tensor that this rank's part of it goes into; several times where
        segments have parts of their own."""
        for name, tensor in self._whole():
            yield name, WeightPart(tensor, WHOLE)
        for layer, parts in enumerate(self._layers):
            for segment in self.segments:
                for prefix, part in zip(("self_attn.", "mlp."), parts, strict=True):
                    own = part.segment(segment.number)
                    for name, tensor in own.weights(f"model.layers.{layer}.{prefix}") if own is not None else ():
                        yield name, WeightPart(tensor, cut(self.config, segment, name))
        place = self._head.place()
        if place is not None:
            yield "lm_head.weight", WeightPart(place[0], (place[1],))

    def num_bytes(self) -> int:
        """Returns the bytes of this rank's weights; what segments share counts once."""
        return sum({id(part.tensor): part.tensor.nbytes for _, part in self.shares()}.values())

    def linears(self, segment: Segment) -> Iterator[tuple[str, Linear]]:
        """Yields the layers of a segment that adapters may change, each with the prefix of its weights' names."""
        for layer, parts in enumerate(self._layers):
            for prefix, part in zip(("self_attn.", "mlp."), parts, strict=True):
                own = part.segment(segment.number)
                if own is not None:
                    yield from own.linears(f"model.layers.{layer}.{prefix}")

    def experts(self) -> list[ExpertsMLP]:
        """Returns of each layer with experts one segment: all choose the same."""
        first = [mlp.segment(self.segments[0].number) for _, mlp in self._layers]
        return [mlp for mlp in first if isinstance(mlp, ExpertsMLP)]

    def load(self, weights: Iterable[Stored]) -> None:
        """Copies this rank's parts of each weight to their places."""
        places: dict[str, list[WeightPart]] = {}
        for name, own in self.shares():
            places.setdefault(name, []).append(own)
        for stored in weights:
            whole = as_tensor(stored)
            for tensor, index in places.get(stored.name, ()):
                tensor.copy_(whole[index])

    def finish(self, context_len: int, device: torch.device) -> None:
        """Lays the weights out for the device and makes the rope tables, once all weights are there."""
        for block in self._blocks:
            block.finish()
        self._head.finish()
        self._tables = rope_tables(self.config, context_len, device)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._embedding.weights("model.embed_tokens")
        for index, block in enumerate(self._blocks):
            yield from block.weights(f"model.layers.{index}.")
        yield from self._norm.weights("model.norm")

    def _attention(self, layer: int) -> Segments:
        config, dtype = self.config, self._dtype
        segments = [segment for segment in self.segments if segment.heads]
        own: dict[int, SegmentLayer] = {}
        for place, segment in enumerate(segments, layer * len(segments)):
            shape = self._places[place].shape
            own[segment.number] = make_attention(config, layer, shape, place=place, out_bias=False, dtype=dtype)
        return self._summed(own, "o_proj", has_bias=config.out_bias)

    def _mlp(self, layer: int) -> Segments:
        config, experts, dtype = self.config, self.config.experts_of(layer), self._dtype
        own: dict[int, SegmentLayer] = {}
        routers = None if experts is None else make_routers(config, experts, dtype)
        for index in (segment.number for segment in self.segments):
            if experts is None or routers is None:
                size = len(share(config.intermediate_size, index))
                own[index] = make_mlp(config, size, dtype, down_bias=False)
                continue
            sizes = {name: len(share(getattr(experts, name), index)) for name in ("size", "shared_size")}
            has_bias = config.mlp_bias and index == 0  # an expert adds its bias once
            shares = msgspec.structs.replace(experts, **sizes)
            own[index] = make_experts(config, shares, dtype, *routers, down_bias=has_bias)
        return self._summed(own, "down_proj", has_bias=config.mlp_bias and experts is None)

    def _summed(self, own: dict[int, SegmentLayer], out: str, *, has_bias: bool) -> Segments:
        bias = torch.empty(self.config.hidden_size, dtype=self._dtype) if has_bias else None
        return Segments(own, len(self.segments), self._group, out=out, bias=bias)


def attention_places(config: ModelConfig, segments: Iterable[Segment]) -> list[AttentionPlace]:
    """Returns the attention of a rank's segments in all layers, in the order in which the backend counts them."""
    own = [segment for segment in segments if segment.heads]
    return [
        AttentionPlace(
            layer_shape(config, layer)._replace(num_heads=len(segment.heads), num_kv_heads=len(segment.kv_heads)),
            (layer, segment.kv_heads),
        )
        for layer in range(config.num_layers)
        for segment in own
    ]
