"""Computes an encoder's states on a CPU by the native kernels. No torch.

The matrices of the layers have 16 bits, with a scale for each 128 inputs of a row, and so have their inputs (format Q16
of matrix.h); with dtype float32 both stay as they are. All else is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.encoder import EncoderConfig
from tureen.models.relative import buckets
from tureen.weights.stored import Stored, to_float32

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]

INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Matrices that take the same inputs: they are one, `qkv_proj`."""


class _Shared(NamedTuple):
    """What the layers share when they compute some texts."""

    texts: Any
    angles: Mapping[RopeConfig, tuple[Array, Array]]  # cos and sin of each kind of rotation, [tokens, pairs]
    qkv: Array
    mixed: Array
    up: Array
    gate: Array


class NativeStates:
    """The `States` of a model on the native kernels."""

    def __init__(self, kernels: ModuleType, pool: Any, config: EncoderConfig, weights: dict[str, Any]) -> None:
        """weights: packed matrices of the layers, arrays of all else."""
        self._kernels = kernels
        self._pool = pool
        self._config = config
        self._weights = weights

    def states(self, token_ids: Numbers, positions: Numbers, types: Numbers, starts: Numbers) -> Array:
        config, weights = self._config, self._weights
        hidden: Array = weights["embed_tokens.weight"][token_ids]
        if config.embedding_scale is not None:
            hidden *= np.float32(config.embedding_scale)
        if config.num_token_types:
            hidden += weights["embed_types.weight"][types]
        if config.num_positions:
            hidden += weights["embed_positions.weight"][positions]
        hidden = self._norm(hidden, "embed_norm")
        shared = self._shared(starts)
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            mixed = self._attend(self._norm(hidden, f"{name}.input_layernorm"), layer, shared)
            self._add(hidden, mixed, f"{name}.self_attn.o_proj", f"{name}.post_attention_layernorm")
            inner = self._inner(self._norm(hidden, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp", shared)
            self._add(hidden, inner, f"{name}.mlp.down_proj", f"{name}.post_feedforward_layernorm")
        return self._norm(hidden, "norm")

    def _shared(self, starts: Numbers) -> _Shared:
        config, size = self._config, int(starts[-1])
        width, heads = config.intermediate_size, config.num_heads
        return _Shared(
            texts=self._kernels.Texts(
                self._pool, starts.tolist(), config.num_kv_heads, config.head_dim, self._biases(starts)
            ),
            angles=self._angles(starts),
            qkv=np.empty((size, (heads + 2 * config.num_kv_heads) * config.head_dim), np.float32),
            mixed=np.empty((size, heads, config.head_dim), np.float32),
            up=np.empty((size, width), np.float32),
            gate=np.empty((size, width if config.is_gated else 0), np.float32),
        )

    def _add(self, hidden: Array, x: Array, matrix: str, norm: str) -> None:
        """Adds the product of x to `hidden`, with the norm where the model has it."""
        follows_sum = self._config.norms_follow_sum
        if not follows_sum and f"{norm}.weight" in self._weights:
            hidden += self._norm(self._linear(x, matrix), norm)
            return
        self._linear(x, matrix, hidden, add=True)
        if follows_sum:
            self._norm(hidden, norm, hidden)

    def _inner(self, x: Array, name: str, shared: _Shared) -> Array:
        """Returns what the second matrix of the mlp takes."""
        up = activated = self._linear(x, f"{name}.up_proj", shared.up)
        factors = None
        if self._config.is_gated:
            activated, factors = self._linear(x, f"{name}.gate_proj", shared.gate), up
        if self._config.activation == "relu":
            np.maximum(activated, np.float32(0), out=activated)
            return activated if factors is None else activated * factors
        self._kernels.activate(self._pool, activated, self._config.activation, factors)
        return activated

    def _attend(self, x: Array, layer: int, shared: _Shared) -> Array:
        """Returns the mixed values, [tokens, heads * head_dim]."""
        config, name = self._config, f"layers.{layer}.self_attn"
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self._linear(x, f"{name}.qkv_proj", shared.qkv).reshape(len(x), -1, config.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q, k = (self._norm_heads(part, f"{name}.{which}_norm") for part, which in ((q, "q"), (k, "k")))
        rope = config.ropes[layer]
        if rope is not None:
            cos, sin = shared.angles[rope]
            for part in (q, k):
                self._kernels.rotate_heads(self._pool, part[..., : 2 * cos.shape[1]], cos, sin)
        window = config.windows[layer]
        shared.texts.attend(q, k, v, shared.mixed, config.attention_scale, -1 if window is None else window)
        return shared.mixed.reshape(len(x), -1)

    def _biases(self, starts: Numbers) -> Array | None:
        """Returns what is added to scores, [heads, distances], for distances of the longest text."""
        if not self._config.num_buckets:
            return None
        longest = int(np.diff(starts).max())
        table = buckets(np.arange(1 - longest, longest), self._config.num_buckets)
        return np.ascontiguousarray(self._weights["relative_bias.weight"][table].T)

    def _angles(self, starts: Numbers) -> dict[RopeConfig, tuple[Array, Array]]:
        """Returns the cos and sin of each kind of rotation, [tokens, pairs]."""
        places = np.concatenate([np.arange(length, dtype=np.float32) for length in np.diff(starts)])
        angles = {}
        for rope in {rope for rope in self._config.ropes if rope is not None}:
            turned = places[:, None] * frequencies(rope, self._config.head_dim, self._config.max_tokens)
            angles[rope] = np.cos(turned), np.sin(turned)
        return angles

    def _linear(self, x: Array, name: str, out: Array | None = None, *, add: bool = False) -> Array:
        product: Array = self._kernels.linear(
            self._pool, x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"), out, add
        )
        return product

    def _norm_heads(self, heads: Array, name: str) -> Array:
        if f"{name}.weight" not in self._weights:
            return heads
        rows = np.ascontiguousarray(heads).reshape(-1, heads.shape[-1])
        return self._norm(rows, name).reshape(heads.shape)

    def _norm(self, x: Array, name: str, out: Array | None = None) -> Array:
        """Returns x as it is where the model has no norm of that name. out: where it is written, which may be x."""
        weight = self._weights.get(f"{name}.weight")
        if weight is None:
            return x
        normed: Array
        if self._config.rms_norms:
            normed = self._kernels.rms_norm(self._pool, x, weight, self._config.norm_eps, out)
        else:
            bias = self._weights.get(f"{name}.bias")
            normed = self._kernels.layer_norm(self._pool, x, weight, bias, self._config.norm_eps, out)
        return normed


def load(shape: EncoderConfig, device: DeviceInfo, dtype: str, weights: Iterable[Stored]) -> NativeStates:
    """Packs these weights, those of `shape.weights()`, for matrices of `dtype`: int16 or float32. Raises
    StartupError."""
    kernels = native.require()
    if shape.head_dim % 2 or shape.head_dim > kernels.MAX_HEAD_DIM:
        raise StartupError(
            f"the model's heads have {shape.head_dim} dimensions; the native kernels take even numbers up to "
            f"{kernels.MAX_HEAD_DIM}; start with --kernels torch",
            field="kernels",
        )
    pool = kernels.Pool(device.num_threads, False)
    packed: dict[str, Any] = {}
    parts: dict[str, Array] = {}
    for stored in weights:
        values = to_float32(stored)
        *path, module, kind = stored.name.split(".")
        name = stored.name
        if module in INPUT_PROJECTIONS:
            parts[name] = values
            names = [".".join((*path, part, kind)) for part in INPUT_PROJECTIONS]
            if not all(part in parts for part in names):
                continue
            name, values = ".".join((*path, "qkv_proj", kind)), np.concatenate([parts.pop(part) for part in names])
        packed[name] = _packed(kernels, pool, values, dtype) if is_matrix(name, values.shape) else values
    if parts:
        raise StartupError(
            f"the model has {', '.join(parts)}, but not the same weight of all of q_proj, k_proj and v_proj"
        )
    return NativeStates(kernels, pool, shape, packed)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a weight is multiplied by, and so has the type of matrices."""
    return name.startswith("layers.") and len(shape) == 2


def num_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Returns the bytes of weights of these shapes with matrices of `dtype`."""
    width = 2 if dtype == "int16" else 4
    return sum((width if is_matrix(name, shape) else 4) * math.prod(shape) for name, shape in shapes.items())


def _packed(kernels: ModuleType, pool: Any, values: Array, dtype: str) -> Any:
    stored = values.reshape(-1).view(np.uint8)
    return kernels.Matrix.pack(pool, stored, "F32", "Q16" if dtype == "int16" else "F32", *values.shape)
