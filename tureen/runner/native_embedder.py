"""Computes an encoder's states on a CPU, in float32: products by the native kernels, the rest by numpy."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.devices.base import DeviceInfo
from tureen.kernels.cpu import native
from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.encoder import EncoderConfig
from tureen.models.relative import buckets
from tureen.runner.elementwise import ACTIVATIONS, layer_norm, rms_norm
from tureen.weights.stored import Stored, to_float32

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]

QUERIES = 256
"""Tokens whose scores are computed together: a score takes 4 bytes for each head and each token that is seen."""


class NativeStates:
    """The `States` of a model in float32."""

    dtype = "float32"

    def __init__(self, kernels: ModuleType, pool: Any, config: EncoderConfig, weights: dict[str, Any]) -> None:
        """weights: packed matrices of the layers, arrays of all else."""
        self._kernels = kernels
        self._pool = pool
        self._config = config
        self._weights = weights

    def states(self, token_ids: Numbers, positions: Numbers, types: Numbers) -> Array:
        config, weights = self._config, self._weights
        hidden = weights["embed_tokens.weight"][token_ids]
        if config.embedding_scale is not None:
            hidden = hidden * np.float32(config.embedding_scale)
        if config.num_token_types:
            hidden = hidden + weights["embed_types.weight"][types]
        if config.num_positions:
            hidden = hidden + weights["embed_positions.weight"][positions]
        hidden = self._norm(hidden, "embed_norm")
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            mixed = self._attend(self._norm(hidden, f"{name}.input_layernorm"), layer)
            hidden = self._sum(hidden, mixed, f"{name}.post_attention_layernorm")
            inner = self._mlp(self._norm(hidden, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
            hidden = self._sum(hidden, inner, f"{name}.post_feedforward_layernorm")
        return self._norm(hidden, "norm")

    def _sum(self, hidden: Array, added: Array, norm: str) -> Array:
        if self._config.norms_follow_sum:
            return self._norm(hidden + added, norm)
        return hidden + self._norm(added, norm)

    def _mlp(self, x: Array, name: str) -> Array:
        activate = ACTIVATIONS[self._config.activation]
        up = self._linear(x, f"{name}.up_proj")
        inner = activate(self._linear(x, f"{name}.gate_proj")) * up if self._config.is_gated else activate(up)
        return self._linear(inner, f"{name}.down_proj")

    def _attend(self, x: Array, layer: int) -> Array:
        config, size = self._config, len(x)
        name = f"layers.{layer}.self_attn"
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(size, -1, config.head_dim).transpose(1, 0, 2)
            for part in "qkv"
        )
        q, k = (self._norm(heads, f"{name}.{part}_norm") for heads, part in ((q, "q"), (k, "k")))
        rope = config.ropes[layer]
        if rope is not None:
            q, k = _rotated(q, rope, config), _rotated(k, rope, config)
        q = q * np.float32(config.attention_scale)
        shared = config.num_heads // config.num_kv_heads
        if shared > 1:
            k, v = (np.repeat(heads, shared, axis=0) for heads in (k, v))
        mixed = [self._part(q[:, at : at + QUERIES], k, v, at, layer) for at in range(0, size, QUERIES)]
        whole = np.concatenate(mixed, axis=1).transpose(1, 0, 2)
        return self._linear(np.ascontiguousarray(whole).reshape(size, -1), f"{name}.o_proj")

    def _part(self, q: Array, k: Array, v: Array, start: int, layer: int) -> Array:
        """Returns the mixed values of tokens from `start` on, [heads, tokens, head_dim]."""
        window, first, end = self._config.windows[layer], 0, k.shape[1]
        if window is not None:
            first, end = max(0, start - window), min(end, start + q.shape[1] + window)
        scores = np.matmul(q, k[:, first:end].transpose(0, 2, 1))
        if self._config.num_buckets or window is not None:
            distances = np.arange(first, end) - np.arange(start, start + q.shape[1])[:, None]
            if self._config.num_buckets:
                table = buckets(distances, self._config.num_buckets)
                scores += self._weights["relative_bias.weight"][table].transpose(2, 0, 1)
            if window is not None:
                scores[:, np.abs(distances) > window] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed: Array = np.matmul(scores, v[:, first:end]) / scores.sum(axis=-1, keepdims=True)
        return mixed

    def _linear(self, x: Array, name: str) -> Array:
        product: Array = self._kernels.linear(
            self._pool, np.ascontiguousarray(x), self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        )
        return product

    def _norm(self, x: Array, name: str) -> Array:
        """Returns x as it is where the model has no norm of that name."""
        weight = self._weights.get(f"{name}.weight")
        if weight is None:
            return x
        if self._config.rms_norms:
            return rms_norm(x, weight, self._config.norm_eps)
        return layer_norm(x, weight, self._weights.get(f"{name}.bias"), self._config.norm_eps)


def _rotated(x: Array, rope: RopeConfig, config: EncoderConfig) -> Array:
    """Returns heads [heads, tokens, head_dim] turned by their positions."""
    turns = frequencies(rope, config.head_dim, config.max_tokens)
    angles = np.arange(x.shape[1], dtype=np.float32)[:, None] * turns
    cos, sin, half = np.cos(angles), np.sin(angles), len(turns)
    left, right = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]), axis=-1)


def load(shape: EncoderConfig, device: DeviceInfo, weights: Iterable[Stored]) -> NativeStates:
    """Packs these weights, those of `shape.weights()`."""
    kernels = native.require()
    pool = kernels.Pool(device.num_threads, False)
    return NativeStates(kernels, pool, shape, {stored.name: _packed(kernels, pool, stored) for stored in weights})


def _packed(kernels: ModuleType, pool: Any, stored: Stored) -> Any:
    if not stored.name.startswith("layers.") or len(stored.shape) != 2:
        return to_float32(stored)
    return kernels.Matrix.pack(pool, stored.data, stored.encoding, "F32", *stored.shape, stored.row_order)
