"""Computes an embedding model's states on a CPU, in float32: products by the native kernels, the rest by numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.devices.base import DeviceInfo
from tureen.kernels.cpu import native
from tureen.models.bert import BertConfig
from tureen.weights.stored import Stored, to_float32

Array = NDArray[np.float32]

ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ERF_SCALE = 0.3275911
"""Coefficients of an approximation of the error function that is off by at most 1.5e-7.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
"""


class NativeStates:
    """The `States` of a model in float32."""

    dtype = "float32"

    def __init__(self, kernels: ModuleType, pool: Any, config: BertConfig, weights: dict[str, Any]) -> None:
        """weights: packed matrices of the layers, arrays of all else."""
        self._kernels = kernels
        self._pool = pool
        self._config = config
        self._weights = weights

    def states(self, token_ids: Sequence[int]) -> Array:
        weights, size = self._weights, len(token_ids)
        hidden = weights["embeddings.word_embeddings.weight"][np.asarray(token_ids)]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][:size]
        hidden = self._norm(hidden + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for layer in range(self._config.num_layers):
            name = f"encoder.layer.{layer}"
            mixed = self._linear(self._attend(hidden, f"{name}.attention.self"), f"{name}.attention.output.dense")
            hidden = self._norm(hidden + mixed, f"{name}.attention.output")
            inner = gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(inner, f"{name}.output.dense"), f"{name}.output")
        return hidden

    def _attend(self, hidden: Array, name: str) -> Array:
        size, num_heads = len(hidden), self._config.num_heads
        q, k, v = (
            self._linear(hidden, f"{name}.{part}").reshape(size, num_heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = np.matmul(q * np.float32(q.shape[-1] ** -0.5), k.transpose(0, 2, 1))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed: Array = np.matmul(scores, v) / scores.sum(axis=-1, keepdims=True)
        return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(size, -1)

    def _linear(self, x: Array, name: str) -> Array:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        product: Array = self._kernels.linear(self._pool, x, weight, bias)
        return product

    def _norm(self, x: Array, name: str) -> Array:
        weight, bias = self._weights[f"{name}.LayerNorm.weight"], self._weights[f"{name}.LayerNorm.bias"]
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normed: Array = centred / np.sqrt(variance + np.float32(self._config.norm_eps)) * weight + bias
        return normed


def gelu(x: Array) -> Array:
    """Computes x times the probability that a standard normal number is below x (arXiv:1606.08415)."""
    size = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(ERF_SCALE) * size)
    series: Any = np.zeros_like(x)
    for coefficient in reversed(ERF):
        series = (series + np.float32(coefficient)) * t
    erf = 1 - series * np.exp(-size * size)
    result: Array = np.float32(0.5) * x * (1 + np.copysign(erf, x))
    return result


def load(shape: BertConfig, device: DeviceInfo, weights: Iterable[Stored]) -> NativeStates:
    """Packs these weights, those of `shape.weights()`."""
    kernels = native.require()
    pool = kernels.Pool(device.num_threads, False)
    return NativeStates(kernels, pool, shape, {stored.name: _packed(kernels, pool, stored) for stored in weights})


def _packed(kernels: ModuleType, pool: Any, stored: Stored) -> Any:
    if stored.name.startswith("embeddings.") or len(stored.shape) != 2:
        return to_float32(stored)
    return kernels.Matrix.pack(pool, stored.data, stored.encoding, "F32", *stored.shape, stored.row_order)
