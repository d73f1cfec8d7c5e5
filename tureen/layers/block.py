"""Transformer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from tureen.layers.attention import Attention, Step
from tureen.layers.experts import ExpertsMLP
from tureen.layers.linear import Linear
from tureen.layers.mlp import GatedMLP
from tureen.layers.norm import RMSNorm

if TYPE_CHECKING:
    from tureen.layers.segments import Segments


class Block:
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)).

    With four norms: x += scale * norm(attention(norm(x))); the mlp likewise.

    norms: two or four, by the names that checkpoints give them, in the order in which they are applied.
    """

    def __init__(
        self,
        attention: Attention | Segments,
        mlp: GatedMLP | ExpertsMLP | Segments,
        norms: dict[str, RMSNorm],
        scale: float,
    ) -> None:
        self._attention = attention
        self._mlp = mlp
        self._norms = norms
        self._scale = scale
        in_order = tuple(norms.values())
        self._post_norms = in_order[1::2] if len(in_order) == 4 else None
        self._pre_norms = in_order if self._post_norms is None else in_order[::2]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Computes the block for x [tokens, hidden_size], which is changed in place and returned."""
        attended = self._attention(self._pre_norms[0](x), step)
        x.add_(attended if self._post_norms is None else self._post_norms[0](attended), alpha=self._scale)
        fed = self._mlp(self._pre_norms[1](x))
        return x.add_(fed if self._post_norms is None else self._post_norms[1](fed), alpha=self._scale)

    @property
    def experts(self) -> ExpertsMLP | None:
        """The block's mlp where it is made of experts."""
        return self._mlp if isinstance(self._mlp, ExpertsMLP) else None

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yields each weight's name in checkpoints, and the tensor that its values go into. prefix: before the
        names."""
        for name, norm in self._norms.items():
            yield from norm.weights(f"{prefix}{name}")
        yield from self._attention.weights(f"{prefix}self_attn.")
        yield from self._mlp.weights(f"{prefix}mlp.")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield from self._attention.linears(f"{prefix}self_attn.")
        yield from self._mlp.linears(f"{prefix}mlp.")

    def finish(self) -> None:
        """Lays the weights out for the device, once all are there."""
        self._attention.finish()
        self._mlp.finish()
