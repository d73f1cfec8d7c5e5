"""Reckons the memory that a model takes before anything of it is loaded: weights, KV cache, workspace. No torch."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

from msgspec.structs import replace

from tureen.config import Config
from tureen.config_facts import has_ranks
from tureen.contract.runner import SPARE_DRAWS
from tureen.devices import cpu
from tureen.kernels.cpu import native as kernels_module
from tureen.media.families import sees
from tureen.models.config import ModelConfig
from tureen.runner import loading, native
from tureen.runner.kinds import is_encoder
from tureen.runner.kv_pool import KvBytes, bytes_of_kv, state_bytes
from tureen.weights.source import ModelSource, model_config
from tureen.weights.vision import iter_vision

PROCESS_BYTES = 160 << 20
"""About what the server's own process takes beside all that a model needs."""
SMALLER = ("int8", "int4")
SHORT = 256  # the shortest context that is advised, in tokens
STATES = 3
"""States of a sequence in layers without attention: two that it writes in turn, and one that is saved."""


class MemoryNeed(NamedTuple):
    """The bytes that a model takes with some settings, and those that are there."""

    weights: int
    kv_per_token: int  # 0 = it has no cache
    kv_fixed: int  # bytes that do not depend on the context
    context: int
    workspace: int
    free: int
    total: int

    @property
    def kv_cache(self) -> int:
        """Returns the bytes of the KV cache of one full context."""
        return self.kv_per_token * self.context + self.kv_fixed

    @property
    def needed(self) -> int:
        """Returns all bytes: more requests at once than one full context take more."""
        return self.weights + self.kv_cache + self.workspace + PROCESS_BYTES

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


def memory_need(source: ModelSource, config: Config) -> MemoryNeed:
    """Returns what a model on disk takes on the CPU. Reads headers only. Raises StartupError for a model that cannot
    run here."""
    free, total = cpu.free_bytes(), cpu.total_bytes()
    hf = model_config(source)
    if is_encoder(hf):
        return MemoryNeed(sum(path.stat().st_size for path in source.files), 0, 0, 0, PROCESS_BYTES // 4, free, total)
    model = loading.describe(hf)
    weights, kv = _sizes(source, config, model)
    if sees(hf, config):
        is_narrow = _kernels(config) is not None and kernels_module.matrix_dtype(config.dtype) == "int16"
        width = 2 if is_narrow else 4  # of the vision encoder
        weights += sum(width * math.prod(stored.shape) for stored in iter_vision(source))
    context = _context_of(config, model)
    return MemoryNeed(weights, kv.per_token, kv.fixed, context, _workspace(config, model), free, total)


def _context_of(config: Config, model: ModelConfig) -> int:
    return min(config.context_length or model.default_context, model.context_len)


def _sizes(source: ModelSource, config: Config, model: ModelConfig) -> tuple[int, KvBytes]:
    """Returns the bytes of the weights as loaded, and those of the KV cache."""
    kernels = _kernels(config)
    if kernels is None:
        width = 2 if config.dtype in ("bfloat16", "float16") else 4
        return width * sum(map(math.prod, model.weights().values())), bytes_of_kv(config, model, width)
    return native.weight_bytes(kernels, source, config, model), native.bytes_of_kv(kernels, config, model)


def _kernels(config: Config) -> ModuleType | None:
    """Returns the native kernels; None if torch computes."""
    is_torch = config.kernels in ("torch", "tree") or has_ranks(config)
    return None if is_torch else kernels_module.load()


def _workspace(config: Config, model: ModelConfig) -> int:
    """Returns about the bytes of a step's activations, of its logits as computed and as sampled from, and of the states
    of a sequence."""
    keys = [model.keys_of(layer) for layer in range(model.num_layers)]
    heads = max(2 * (model.num_heads + own.num_heads) * own.head_dim for own in keys)
    width = 4 * model.hidden_size + heads + 2 * max(map(model.mlp_size, range(model.num_layers)))
    if model.layer_inputs is not None:
        width += model.num_layers * model.layer_inputs.size
    if model.streams is not None:
        width += 2 * model.streams.count * model.hidden_size + 2 * max(map(model.mlp_size, range(model.num_layers)))
    num_draws = config.max_running_requests + SPARE_DRAWS * config.speculative
    logits = 2 * num_draws * model.vocab_size
    return 4 * (model.longest_step(config.chunked_prefill_size) * width + logits) + STATES * state_bytes(model)


def _context_that_fits(need: MemoryNeed) -> int:
    """Returns the longest context, a multiple of SHORT, with which the need would fit."""
    rest = need.free - need.weights - need.workspace - need.kv_fixed - PROCESS_BYTES
    return rest // need.kv_per_token // SHORT * SHORT


def advice(source: ModelSource, config: Config, need: MemoryNeed) -> str:
    """Says what makes a model fit that does not; "" for one that fits. Raises StartupError."""
    if need.fits:
        return ""
    if need.kv_per_token:  # a token of a short context takes more, see kv_pool.with_windows
        needs = need, memory_need(source, replace(config, context_length=SHORT))
        lengths = [length for length in map(_context_that_fits, needs) if length >= SHORT]
        fitting = [length for length in lengths if memory_need(source, replace(config, context_length=length)).fits]
        if fitting:
            return f"--context-length {max(fitting)}"
    for kind in SMALLER if config.quantization is None else ():
        smaller = memory_need(source, replace(config, quantization=kind, context_length=SHORT))
        if smaller.fits:
            return f"--quantization {kind}"
    return "a smaller model, or one in fewer bits, or free memory"
