"""BERT in torch: turns the tokens of one text into their vectors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from tureen.models.bert import BertConfig


class TorchBert:
    """The encoder that a BertConfig describes.

    weights: those of `BertConfig.weights`, on the device and in the type that is computed in.
    """

    def __init__(self, config: BertConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights

    def states(self, token_ids: Tensor) -> Tensor:
        """Returns the last layer's output for token ids [tokens]: [tokens, hidden_size]. All of the text is of the
        first token type."""
        weights = self._weights
        hidden = weights["embeddings.word_embeddings.weight"][token_ids]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: len(token_ids)]
        hidden = self._norm(hidden + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for layer in range(self._config.num_layers):
            name = f"encoder.layer.{layer}"
            mixed = self._linear(self._attend(hidden, f"{name}.attention.self"), f"{name}.attention.output.dense")
            hidden = self._norm(hidden + mixed, f"{name}.attention.output")
            inner = functional.gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, f"{name}.output.dense"), f"{name}.output")
        return hidden

    def _attend(self, hidden: Tensor, name: str) -> Tensor:
        size, num_heads = len(hidden), self._config.num_heads
        q, k, v = (
            self._linear(hidden, f"{name}.{part}").view(size, num_heads, -1).transpose(0, 1)[None]
            for part in ("query", "key", "value")
        )
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v)[0]
        return mixed.transpose(0, 1).reshape(size, -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.LayerNorm.weight"], self._weights[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self._config.norm_eps)
