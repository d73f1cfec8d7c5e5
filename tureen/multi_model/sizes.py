"""Computes how much of the memory one of several models takes, and how large its KV cache is."""

from __future__ import annotations

from typing import NamedTuple

from tureen.config import Config
from tureen.runner.fit import memory_need
from tureen.runner.kv_pool import CPU_CONTEXTS, CPU_TOKENS
from tureen.weights.source import ModelSource

ENGINE_BYTES, TORCH_BYTES = 96 << 20, 320 << 20
"""Bytes that an engine's process takes beside all that its model needs, without torch and with it."""

LEAST_TOKENS = 4096
"""Size of a KV cache, in tokens, below which no model is loaded; less where its context is shorter."""


class Size(NamedTuple):
    """The memory that a model takes, in bytes, and the tokens of its KV cache; 0 = it has none."""

    num_bytes: int
    num_tokens: int
    weight_bytes: int  # of num_bytes


def size_of(source: ModelSource, config: Config, share_bytes: int, *, uses_torch: bool) -> Size:
    """Computes the size of a model on disk. Its KV cache takes what it leaves of `share_bytes`: at least LEAST_TOKENS
    or its context, at most what it would have alone on a CPU; --max-total-tokens sets it.

    `uses_torch`: its engine imports torch. Raises StartupError for a model that cannot run here.
    """
    need = memory_need(source, config)
    fixed = need.weights + need.workspace + need.kv_fixed + (TORCH_BYTES if uses_torch else ENGINE_BYTES)
    if not need.kv_per_token:
        return Size(fixed, 0, need.weights)
    most = max(CPU_CONTEXTS * need.context, CPU_TOKENS)
    fitting = min(most, (share_bytes - fixed) // need.kv_per_token)
    num_tokens = config.max_total_tokens or max(min(LEAST_TOKENS, need.context), fitting)
    num_pages = -(-num_tokens // config.page_size)
    return Size(fixed + num_pages * config.page_size * need.kv_per_token, num_pages * config.page_size, need.weights)
