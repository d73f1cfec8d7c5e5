"""Computes, before a model is loaded, how much memory it needs. No torch, and no weight is read."""

from __future__ import annotations

import math
from typing import NamedTuple

from tureen.config import Config
from tureen.kernels.cpu import native
from tureen.models.config import ModelConfig
from tureen.registry import declaring
from tureen.runner import loading
from tureen.runner.kv_pool import CPU_CONTEXTS, CPU_TOKENS
from tureen.runner.native import planned_bytes
from tureen.weights.source import ModelSource, model_config

NATIVE_BYTES, TORCH_BYTES = 96 << 20, 320 << 20
"""Bytes that an engine takes besides weights and KV cache: the interpreter, libraries, the tokenizer, room to compute
in."""

LEAST_TOKENS = 4096
"""Size of a KV cache, in tokens, below which no model is loaded; less where its context is shorter."""


class MemoryNeed(NamedTuple):
    """The memory that a model needs, in bytes."""

    fixed: int  # weights, and what every engine takes
    kv_per_token: int  # 0: it has no KV cache
    context_len: int
    page_size: int

    def tokens_in(self, num_bytes: int) -> int:
        """Returns the size of the KV cache, in tokens, of a model that may take so many bytes: at least LEAST_TOKENS
        or its context, at most what it would have alone on a CPU."""
        if not self.kv_per_token:
            return 0
        most = max(CPU_CONTEXTS * self.context_len, CPU_TOKENS)
        least = min(LEAST_TOKENS, self.context_len)
        fitting = (num_bytes - self.fixed) // self.kv_per_token
        return -(-max(least, min(most, fitting)) // self.page_size) * self.page_size

    def total(self, num_tokens: int) -> int:
        """Returns the bytes of the model with a KV cache of so many tokens."""
        return self.fixed + self.kv_per_token * num_tokens


def memory_need(source: ModelSource, config: Config, *, uses_torch: bool) -> MemoryNeed:
    """Computes the memory that a model needs with these settings. `uses_torch`: its engine imports torch.

    Raises StartupError where its files do not say what it is.
    """
    hf = model_config(source)
    if declaring("tureen.models", "EMBEDDING_ARCHITECTURES", loading.architecture_of(hf)) is not None:
        files = [source.path] if source.path.is_file() else list(source.path.glob("*.safetensors"))
        return MemoryNeed(2 * sum(file.stat().st_size for file in files) + TORCH_BYTES, 0, 0, 1)
    model = loading.describe(hf)
    context_len = min(config.context_length or model.context_len, model.context_len)
    if uses_torch or not native.is_built():
        return MemoryNeed(_torch_bytes(config, model) + TORCH_BYTES, _kv_bytes(model), context_len, config.page_size)
    weights, kv_per_token = planned_bytes(source, config, model)
    return MemoryNeed(weights + NATIVE_BYTES, kv_per_token, context_len, config.page_size)


def _torch_bytes(config: Config, model: ModelConfig) -> int:
    size = 4 if config.dtype in ("auto", "float32") else 2
    return size * sum(math.prod(shape) for shape in model.weights().values())


def _kv_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a token in a KV cache of float32."""
    return 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
