"""The transformer block most models share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tureen.layers.attention import Attention, Step
from tureen.layers.mlp import GatedMLP
from tureen.layers.norm import RMSNorm


class PreNormBlock:
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(self, input_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, hidden_size] -> the same tensor, changed in place."""
        x.add_(self._attention(self._input_norm(x), step))
        return x.add_(self._mlp(self._mlp_norm(x)))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._input_norm.weights(f"{prefix}input_layernorm")
        yield from self._attention.weights(f"{prefix}self_attn.")
        yield from self._mlp_norm.weights(f"{prefix}post_attention_layernorm")
        yield from self._mlp.weights(f"{prefix}mlp.")

    def finish(self) -> None:
        self._attention.finish()
        self._mlp.finish()
