"""A layer of the torch model over several residual streams; see layer_inputs.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tureen.layers.activation import tanh
from tureen.layers.attention import Attention, Step
from tureen.layers.layer_inputs import ResidualStreams
from tureen.layers.linear import Linear
from tureen.layers.mlp import MLP
from tureen.layers.norm import Norm
from tureen.layers.second_embedding import LayerInput

LEAST_SQUARE = 1e-5
"""The smallest mean square by which a stream is scaled."""


class StreamMaps:
    """Expands an embedding into streams, and merges streams into one result."""

    def __init__(self, count: int, names: tuple[str, str], hidden_size: int, dtype: torch.dtype) -> None:
        """names: the prefixes of the matrices into streams and out of them."""
        self._into, self._out = (
            [
                Linear(hidden_size, {f"{name}.{index}": hidden_size}, bias=False, dtype=dtype)
                for index in range(count - 1)
            ]
            for name in names
        )

    def begin(self, x: Tensor) -> Tensor:
        """Returns [streams, tokens, hidden_size]: x, and the other streams scaled to the mean square of x."""
        return torch.stack([x, *(_as_large(into(x), x) for into in self._into)])

    def end(self, streams: Tensor) -> Tensor:
        """Returns the mean of the first stream and the projections of the others, [tokens, hidden_size]."""
        first, others = streams[0], streams[1:]
        parts = [_as_large(out(other), first) for out, other in zip(self._out, others, strict=True)]
        return torch.stack([first, *parts]).mean(dim=0)

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for linear in (*self._into, *self._out):
            yield from linear.weights(prefix)

    def finish(self) -> None:
        for linear in (*self._into, *self._out):
            linear.finish()


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """Returns x scaled so that its mean square is that of `like`."""
    size = like.square().mean(dim=-1, keepdim=True).sqrt()
    return x * size / x.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()


class StreamBlock:
    """A layer over several streams.

    norms: the norms before and after attention, then before and after the mlp, by name. extra_norms: the norms of the
    router and of the low-rank product.
    """

    def __init__(
        self,
        streams: ResidualStreams,
        hidden_size: int,
        attention: Attention,
        mlp: MLP,
        norms: dict[str, Norm],
        extra_norms: tuple[Norm, Norm],
        layer_input: LayerInput,
        dtype: torch.dtype,
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._norms = norms
        self._router_norm, self._low_norm = extra_norms
        self._layer_input = layer_input
        count = self._count = streams.count
        self._router = Linear(hidden_size, {"modality_router": count}, bias=False, dtype=torch.float32)
        self._prediction = Linear(count, {"prediction_coefs": count**2}, bias=False, dtype=torch.float32)
        self._correction = Linear(count, {"correction_coefs": count}, bias=False, dtype=torch.float32)
        self._scale = torch.empty(hidden_size, dtype=torch.float32)
        self._left = Linear(hidden_size, {"linear_left": streams.rank}, bias=False, dtype=dtype)
        self._right = Linear(streams.rank, {"linear_right": hidden_size}, bias=False, dtype=dtype)

    @property
    def experts(self) -> None:
        """A layer with streams has no experts."""

    def __call__(self, streams: Tensor, step: Step) -> Tensor:
        """Computes the layer for streams [streams, tokens, hidden_size]."""
        before, after, before_mlp, after_mlp = self._norms.values()
        mixed = self._prediction(self._routed(streams[0])).to(streams.dtype).view(-1, self._count, self._count)
        predicted = streams.clone()
        for index, stream in enumerate(streams):
            predicted.addcmul_(mixed[:, :, index].T[..., None], stream)
        x = predicted[0].clone()
        normed = before(x)
        low = normed + self._low_norm(self._right(self._left(normed)))
        x = (x + after(self._attention(normed, step)) + low) * 2**-0.5
        x += after_mlp(self._mlp(before_mlp(x)))
        shares = (self._correction(self._routed(x)) + 1).to(x.dtype)
        corrected = predicted + (x - predicted[0]) * shares.T[..., None]
        assert step.layer_inputs is not None
        corrected[1:] += self._layer_input.added((corrected[0] * self._scale).to(x.dtype), step.layer_inputs)
        return corrected

    def _routed(self, x: Tensor) -> Tensor:
        """Returns the weights of the streams for each token, float32 [tokens, streams]."""
        return tanh(self._router(self._router_norm(x).float() / x.shape[-1]))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, norm in self._norms.items():
            yield from norm.weights(f"{prefix}{name}")
        yield from self._router_norm.weights(f"{prefix}altup.router_norm")
        yield from self._low_norm.weights(f"{prefix}laurel.post_laurel_norm")
        yield f"{prefix}altup.correct_output_scale", self._scale
        for name, part in self._parts():
            yield from part.weights(f"{prefix}{name}")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield from self._attention.linears(f"{prefix}self_attn.")
        yield from self._mlp.linears(f"{prefix}mlp.")
        yield from self._layer_input.linears(prefix)
        yield f"{prefix}laurel.", self._left
        yield f"{prefix}laurel.", self._right

    def finish(self) -> None:
        for _, part in self._parts():
            part.finish()

    def _parts(self) -> Iterator[tuple[str, Attention | MLP | LayerInput | Linear]]:
        yield "self_attn.", self._attention
        yield "mlp.", self._mlp
        yield "", self._layer_input
        yield "laurel.", self._left
        yield "laurel.", self._right
        for linear in (self._router, self._prediction, self._correction):
            yield "altup.", linear
