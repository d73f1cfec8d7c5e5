"""The second embedding of the torch model, and the step that adds it to a layer; see layer_inputs.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tureen.layers.activation import PLAIN
from tureen.layers.embedding import Embedding
from tureen.layers.layer_inputs import LayerInputs
from tureen.layers.linear import Linear
from tureen.layers.norm import Norm


class SecondEmbedding:
    """Computes every layer's part of the second embedding; see LayerInputs."""

    def __init__(self, inputs: LayerInputs, num_layers: int, hidden_size: int, norm: Norm, dtype: torch.dtype) -> None:
        """norm: the norm of a layer's part."""
        self._inputs = inputs
        self._num_layers = num_layers
        self._scale = hidden_size**-0.5
        width = num_layers * inputs.size
        self._table = Embedding(inputs.vocab_size, width, dtype=dtype, scale=inputs.size**0.5)
        self._projection = Linear(hidden_size, {"per_layer_model_projection": width}, bias=False, dtype=dtype)
        self._norm = norm

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Returns [tokens, layers, size] for tokens and their first embeddings x."""
        shape = len(token_ids), self._num_layers, self._inputs.size
        is_known = (token_ids >= 0) & (token_ids < self._inputs.vocab_size)
        own = self._table(token_ids.where(is_known, 0)).view(shape)
        return (self._norm((self._projection(x) * self._scale).view(shape)) + own) * 2**-0.5

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._table.weights(f"{prefix}embed_tokens_per_layer")
        yield from self._projection.weights(prefix)
        yield from self._norm.weights(f"{prefix}per_layer_projection_norm")

    def finish(self) -> None:
        self._projection.finish()


class LayerInput:
    """Adds a layer's part of the second embedding to the layer's result; see LayerInputs."""

    def __init__(
        self, layer: int, hidden_size: int, size: int, activation: str, norm: Norm, dtype: torch.dtype
    ) -> None:
        """norm: the norm of the added vector."""
        self._layer = layer
        self._gate = Linear(hidden_size, {"per_layer_input_gate": size}, bias=False, dtype=dtype)
        self._out = Linear(size, {"per_layer_projection": hidden_size}, bias=False, dtype=dtype)
        self._activation = PLAIN[activation]
        self._norm = norm

    def added(self, x: Tensor, layer_inputs: Tensor) -> Tensor:
        """Returns the layer's contribution to x [tokens, hidden_size]. layer_inputs: the parts of all layers."""
        return self._norm(self._out(self._activation(self._gate(x)) * layer_inputs[:, self._layer]))

    def weights(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self._gate.weights(prefix)
        yield from self._out.weights(prefix)
        yield from self._norm.weights(f"{prefix}post_per_layer_input_norm")

    def linears(self, prefix: str) -> Iterator[tuple[str, Linear]]:
        """Yields the layers that adapters may change, each with the prefix of its weights' names."""
        yield prefix, self._gate
        yield prefix, self._out

    def finish(self) -> None:
        self._gate.finish()
        self._out.finish()
