"""Load a model for the native CPU kernels: weights packed as they are stored, or in fewer bits. No torch."""

from __future__ import annotations

from collections import Counter
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
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, to_float32

PLAIN = ("F32", "F16", "BF16")
OF_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
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
    weight_bytes = _weight_bytes(kernels, source, config, model)
    form = "the types of the file" if config.dtype == "auto" else config.dtype
    loading.require_memory(weight_bytes, config.quantization or form, device)
    capacity = plan_capacity(config, model, token_bytes=token_bytes, weight_bytes=weight_bytes, device=device)
    weights = {
        stored.name: _packed(kernels, pool, stored, config) if len(stored.shape) == 2 else to_float32(stored)
        for stored in loading.weights(source, hf, model, load_format=config.load_format, progress=progress)
    }
    cache = kernels.KvCache(model.num_layers, capacity.num_pages, *shape)
    tape = kernels.Tape(pool, cache, model.hidden_size, model.vocab_size)
    record(tape, model, weights)
    formats = Counter(weight.format for weight in weights.values() if not isinstance(weight, np.ndarray))
    sampler = make_sampler(config, model.vocab_size, NativeArithmetic(pool))
    return ModelRunner(TapeForward(tape, formats.most_common(1)[0][0].lower()), sampler, capacity)


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


def _weight_bytes(kernels: ModuleType, source: ModelSource, config: Config, model: ModelConfig) -> int:
    if config.load_format == "dummy":
        stored = [Stored(name, shape, "F32", NO_BYTES) for name, shape in model.weights().items()]
    else:
        found = loading.weights(source, model_config(source), model, load_format="auto", progress=no_progress)
        stored = list(found)
    total: int = sum(4 * one.shape[0] for one in stored if len(one.shape) == 1)
    matrices = (one for one in stored if len(one.shape) == 2)
    total += sum(kernels.packed_bytes(_format_of(one, config), *one.shape) for one in matrices)
    return total


def _format_of(stored: Stored, config: Config) -> str:
    """What a matrix is packed as."""
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
    return "float32" if config.dtype == "float32" else "bfloat16"
