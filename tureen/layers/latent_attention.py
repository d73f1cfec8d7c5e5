"""Latent attention of the torch model; see latent.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tureen.attention.base import LayerShape
from tureen.layers.attention import Step
from tureen.layers.latent import Latent
from tureen.layers.linear import Linear
from tureen.layers.norm import RMSNorm
from tureen.layers.rotary import rotate


class LatentAttention:
    """See Latent."""

    def __init__(
        self,
        latent: Latent,
        layer: int,
        hidden_size: int,
        shape: LayerShape,
        *,
        rope: int | None,
        dtype: torch.dtype,
    ) -> None:
        """shape: of the heads in the latent's space. rope: see Attention."""
        self._latent = latent
        self._layer = layer
        self._shape = shape
        self._rope = rope
        heads, bias, low = shape.num_heads, latent.has_bias, latent.query_rank
        self._latents = Linear(hidden_size, {"kv_a_proj_with_mqa": latent.cached_dim}, bias=bias, dtype=dtype)
        self._latent_norm = RMSNorm(latent.rank, latent.norm_eps)
        self._low = Linear(hidden_size, {"q_a_proj": low}, bias=bias, dtype=dtype) if low else None
        self._low_norm = RMSNorm(low, latent.norm_eps) if low else None
        name = "q_b_proj" if low else "q_proj"
        self._queries = Linear(low or hidden_size, {name: heads * latent.query_dim}, bias=False, dtype=dtype)
        self._keys, self._values = (
            [Linear(width, {f"{name}.{head}": size}, bias=False, dtype=dtype) for head in range(heads)]
            for name, width, size in (
                ("k_b_proj", latent.plain_dim, latent.rank),
                ("v_b_proj", latent.rank, latent.value_dim),
            )
        )
        self._out = Linear(heads * latent.value_dim, {"o_proj": hidden_size}, bias=bias, dtype=dtype)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        latent, heads = self._latent, self._shape.num_heads
        low = x
        if self._low is not None and self._low_norm is not None:
            low = self._low_norm(self._low(x))
        query = self._queries(low).view(-1, heads, latent.query_dim)
        plain, turned = query[..., : latent.plain_dim], query[..., latent.plain_dim :]
        projected = self._latents(x)
        key, position = self._latent_norm(projected[:, : latent.rank]), projected[:, None, latent.rank :]
        if self._rope is not None:
            turned, position = (rotate(vectors, step.rope[self._rope]) for vectors in (turned, position))
        absorbed = torch.stack([keys(plain[:, head]) for head, keys in enumerate(self._keys)], dim=1)
        query = torch.cat((turned, absorbed), dim=-1)
        key = torch.cat((position, key[:, None]), dim=-1)
        mixed = step.attention.forward(query, key, None, self._layer).view(-1, heads, latent.cached_dim)
        mixed = mixed[..., latent.rope_dim :]
        return self._out(torch.cat([values(mixed[:, head]) for head, values in enumerate(self._values)], dim=-1))

    def _linears(self) -> Iterator[Linear]:
        """Yields the layers that adapters may change."""
        yield self._latents
        if self._low is not None:
            yield self._low
        yield self._queries
        yield self._out

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for linear in (*self._linears(), *self._keys, *self._values):
            yield from linear.weights(prefix)
        yield from self._latent_norm.weights(f"{prefix}kv_a_layernorm")
        if self._low_norm is not None:
            yield from self._low_norm.weights(f"{prefix}q_a_layernorm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        for linear in self._linears():
            yield prefix, linear

    def finish(self) -> None:
        for linear in (*self._linears(), *self._keys, *self._values):
            linear.finish()
