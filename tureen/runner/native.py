"""Load a model for the native CPU kernels: weights packed as they are stored, or in fewer bits. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from tureen.config import Config
from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.log import Progress, get_logger, no_progress
from tureen.models.config import ModelConfig
from tureen.runner import loading
from tureen.runner.graphs import TapeForward, record
from tureen.runner.kv_pool import plan_capacity
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.packed_copy import LEAST_BYTES, PackedCopy, Planned
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, to_float32

PLAIN = ("F32", "F16", "BF16")
OF_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
ROUTERS = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")
"""Small, and what they decide is not to change."""
GROUP = 32  # inputs that share a scale
BLOCK = 16  # tokens that the KV cache keeps together
NO_BYTES = np.empty(0, np.uint8)

log = get_logger("runner")


def load_runner(source: ModelSource, config: Config, device: DeviceInfo, progress: Progress) -> ModelRunner:
    """Load a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    kernels = native.require()
    hf = model_config(source)
    model = loading.describe(hf)
    shape = (config.page_size, model.num_kv_heads, model.head_dim, _kv_dtype(config))
    token_bytes = _token_bytes(kernels, model.num_layers, shape)
    pool = _pool(kernels, device.num_threads)
    planned = _plan(source, config, model)
    weight_bytes = sum(_bytes_of(kernels, one) for one in planned)
    form = "the types of the file" if config.dtype == "auto" else config.dtype
    loading.require_memory(weight_bytes, config.quantization or form, device)
    capacity = plan_capacity(config, model, token_bytes=token_bytes, weight_bytes=weight_bytes, device=device)
    copy = PackedCopy(source, config, kernels, planned) if _is_copied(config, weight_bytes) else None
    weights = copy.read(device.num_threads, progress) if copy else None
    if weights is None:
        found = loading.weights(source, hf, model, load_format=config.load_format, progress=progress)
        weights = {
            stored.name: _packed(kernels, pool, stored, config) if len(stored.shape) == 2 else to_float32(stored)
            for stored in found
        }
        if copy:
            copy.write(weights)
    cache = kernels.KvCache(model.num_layers, capacity.num_pages, *shape)
    tape = kernels.Tape(pool, cache, model.hidden_size, model.vocab_size)
    record(tape, model, capacity.context_len, weights)
    formats = Counter(weight.format for weight in weights.values() if not isinstance(weight, np.ndarray))
    sampler = make_sampler(config, model.vocab_size, NativeArithmetic(pool))
    return ModelRunner(TapeForward(tape, formats.most_common(1)[0][0].lower()), sampler, capacity, model)


def _token_bytes(kernels: ModuleType, num_layers: int, shape: tuple[int, int, int, str]) -> int:
    """What a token takes in the KV cache. shape: page size, kv heads, head_dim, dtype."""
    if shape[0] % BLOCK:
        log.warning("--page-size %d: a multiple of %d wastes no memory of the KV cache", shape[0], BLOCK)
    try:
        token_bytes: int = kernels.KvCache(num_layers, 1, *shape).bytes_per_token
    except ValueError as error:
        raise StartupError(
            f"the native kernels cannot hold this model's keys: {error}; use --kernels torch", field="kernels"
        ) from None
    return token_bytes


def _pool(kernels: ModuleType, num_threads: int) -> Any:
    try:
        return kernels.Pool(num_threads)
    except RuntimeError:
        raise StartupError(
            f"--num-threads {num_threads}: the system does not start so many; lower it", field="num_threads"
        ) from None


def _plan(source: ModelSource, config: Config, model: ModelConfig) -> list[Planned]:
    """Every weight as it will be in memory. Raises StartupError when the files are not what the config says."""
    found: Iterable[Stored]
    if config.load_format == "dummy":
        found = [Stored(name, shape, "F32", NO_BYTES) for name, shape in model.weights().items()]
    else:
        found = loading.weights(source, model_config(source), model, load_format="auto", progress=no_progress)
    return [Planned(one.name, one.shape, _format_of(one, config) if len(one.shape) == 2 else "") for one in found]


def _bytes_of(kernels: ModuleType, planned: Planned) -> int:
    return kernels.packed_bytes(planned.format, *planned.shape) if planned.format else 4 * math.prod(planned.shape)


def _is_copied(config: Config, weight_bytes: int) -> bool:
    """Stored formats are packed nearly as fast as a copy is read: docs/decisions/0022-packed-copy.md."""
    is_made = config.quantization is not None and config.load_format != "dummy"
    return config.packed_cache and is_made and weight_bytes >= LEAST_BYTES


def _format_of(stored: Stored, config: Config) -> str:
    """What a matrix is packed as."""
    if stored.name.endswith(ROUTERS):
        return "F32"
    if config.quantization == "int8":
        return "Q8_ROW"
    if config.quantization == "int4":
        is_layer = ".layers." in stored.name  # the embedding and the head decide too much
        return "Q4_1" if is_layer and stored.shape[1] % GROUP == 0 else "Q8_ROW"
    if config.dtype != "auto":
        return OF_DTYPE[config.dtype]
    return "BF16" if stored.encoding in PLAIN else stored.encoding


def _packed(kernels: ModuleType, pool: Any, stored: Stored, config: Config) -> Any:
    rows, cols = stored.shape
    return kernels.Matrix.pack(
        pool, stored.data, stored.encoding, _format_of(stored, config), rows, cols, stored.row_order
    )


def _kv_dtype(config: Config) -> str:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "float32" if config.dtype == "float32" else "int16"
