"""Transformer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tureen.kernels.fused import FusedKernels
from tureen.layers.attention import Attention, Step
from tureen.layers.experts import ExpertsBeside, ExpertsMLP
from tureen.layers.linear import Linear
from tureen.layers.mlp import MLP
from tureen.layers.norm import Norm, RMSNorm
from tureen.layers.second_embedding import LayerInput

if TYPE_CHECKING:
    from tureen.layers.latent_attention import LatentAttention
    from tureen.layers.recurrent import Beside, RecurrentLayer
    from tureen.layers.segments import Segments

    TokenMixer = Attention | LatentAttention | RecurrentLayer | Beside | Segments
    Feed = MLP | ExpertsMLP | ExpertsBeside | Segments


NormPlaces = Literal["pre", "post", "both", "parallel"]


class Block:
    """x += scale * attention(x); x += scale * mlp(x), with norms before, after, or both; see ModelConfig.norms.
    A block may have one of the two alone, with one norm before it.

    norms: by the names that checkpoints give them, in the order in which they are applied.
    """

    def __init__(
        self,
        attention: TokenMixer | None,
        mlp: Feed | None,
        norms: dict[str, Norm],
        places: NormPlaces,
        scale: float,
        *,
        layer_input: LayerInput | None = None,
        has_result_scale: bool = False,
    ) -> None:
        """has_result_scale: a weight multiplies the block's result."""
        self._attention = attention
        self._mlp = mlp
        self._norms = norms
        self._scale = scale
        self._layer_input = layer_input
        self._result_scale = torch.empty(1, dtype=torch.float32) if has_result_scale else None
        in_order = tuple(norms.values())
        self._is_parallel = places == "parallel"
        before = in_order * 2 if attention is None or mlp is None else in_order
        self._pre_norms = {"pre": before, "both": in_order[::2], "parallel": in_order * 2, "post": ()}[places]
        self._post_norms = {"both": in_order[1::2], "post": in_order}.get(places, ())

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Computes the block for x [tokens, hidden_size], which is changed in place and returned."""
        attended = None if self._attention is None else self._after(0, self._attention(self._before(0, x), step))
        if self._mlp is None:
            if attended is not None:
                x.add_(attended, alpha=self._scale)
        else:
            normed = self._mlp_input(x, None if self._is_parallel else attended)
            fed = self._mlp(normed, x) if isinstance(self._mlp, ExpertsBeside) else self._mlp(normed)
            x.add_(self._after(1, fed), alpha=self._scale)
            if attended is not None and self._is_parallel:
                x.add_(attended, alpha=self._scale)
        if self._layer_input is not None and step.layer_inputs is not None:
            x.add_(self._layer_input.added(x, step.layer_inputs))
        return x if self._result_scale is None else x.mul_(self._result_scale)

    def fuse(self, kernels: FusedKernels) -> None:
        """Computes norms and a gated activation by fused kernels from now on."""
        for norm in self._norms.values():
            if isinstance(norm, RMSNorm):
                norm.fuse(kernels)
        if isinstance(self._mlp, MLP):
            self._mlp.fuse(kernels)

    def _mlp_input(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Adds what attention gave to x, if it is to be added now, and returns the input of the mlp."""
        if added is not None and self._pre_norms:
            return self._pre_norms[1].after_adding(x, added, self._scale)
        if added is not None:
            x.add_(added, alpha=self._scale)
        return self._before(1, x)

    def _before(self, part: int, x: Tensor) -> Tensor:
        return self._pre_norms[part](x) if self._pre_norms else x

    def _after(self, part: int, x: Tensor) -> Tensor:
        return self._post_norms[part](x) if self._post_norms else x

    @property
    def experts(self) -> ExpertsMLP | None:
        """The block's experts, if it has any."""
        mlp = self._mlp.experts if isinstance(self._mlp, ExpertsBeside) else self._mlp
        return mlp if isinstance(mlp, ExpertsMLP) else None

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yields each weight's name in checkpoints, and the tensor that its values go into. prefix: before the
        names."""
        for name, norm in self._norms.items():
            yield from norm.weights(f"{prefix}{name}")
        if isinstance(self._mlp, ExpertsBeside):
            for name, norm in self._mlp.norms.items():
                yield from norm.weights(f"{prefix}{name}")
        for name, part in self._parts():
            yield from part.weights(f"{prefix}{name}")
        if self._result_scale is not None:
            yield f"{prefix}layer_scalar", self._result_scale

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        for name, part in self._parts():
            yield from part.linears(f"{prefix}{name}")

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        for _, part in self._parts():
            part.finish()

    def _parts(self) -> Iterator[tuple[str, TokenMixer | Feed | LayerInput]]:
        """Yields each part with the prefix of its weights' names."""
        if self._attention is not None:
            yield "self_attn.", self._attention
        if self._mlp is not None:
            yield "mlp.", self._mlp
        if self._layer_input is not None:
            yield "", self._layer_input
