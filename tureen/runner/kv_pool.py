"""The tensors that hold keys and values, and how many tokens they can hold."""

from __future__ import annotations

import math
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.config import Config
from tureen.devices.base import DeviceInfo
from tureen.errors import StartupError
from tureen.models.config import ModelConfig

CPU_CONTEXTS, CPU_TOKENS = 4, 65536  # on CPU the computed pool holds at most this many contexts or tokens
GIB = 1 << 30


class KvPool(NamedTuple):
    """keys[layer], values[layer]: [num_pages, page_size, kv_heads, head_dim], zeros at first."""

    keys: list[Tensor]
    values: list[Tensor]


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def fit_pages(config: Config, *, token_bytes: int, context_len: int, free: int, device: DeviceInfo) -> int:
    """Number of pages: as asked by max_total_tokens, else what mem_fraction_static of the free bytes holds.

    Raises StartupError when they do not fit, with the numbers and the settings to change.
    """
    size = config.page_size
    where = f"{device.name} has {free / GIB:.2f} GiB free after the weights"
    if config.max_total_tokens is not None:
        pages = config.max_total_tokens // size
        if pages < 1:
            raise StartupError(
                f"--max-total-tokens {config.max_total_tokens} is less than one page of {size} tokens; "
                "raise it or lower --page-size",
                field="max_total_tokens",
            )
        if pages * size * token_bytes > free:
            raise StartupError(
                f"--max-total-tokens {config.max_total_tokens} needs {pages * size * token_bytes / GIB:.2f} GiB, but "
                f"{where}; lower it to at most {max(0, free // token_bytes)}",
                field="max_total_tokens",
            )
        return pages
    pages = int(free * config.mem_fraction_static) // (size * token_bytes)
    if pages < 1:
        raise StartupError(
            f"{where}: not enough for one page of the KV cache ({size * token_bytes / GIB:.2g} GiB) at "
            f"--mem-fraction-static {config.mem_fraction_static}; raise that, lower --page-size, or free memory",
            field="mem_fraction_static",
        )
    if device.type == "cpu":
        pages = min(pages, -(-max(CPU_CONTEXTS * context_len, CPU_TOKENS) // size))
    return pages


def allocate(model: ModelConfig, dtype: torch.dtype, *, num_pages: int, page_size: int, device: DeviceInfo) -> KvPool:
    shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
    tensors = [_zeros(shape, dtype, device) for _ in range(2 * model.num_layers)]
    return KvPool(tensors[::2], tensors[1::2])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: DeviceInfo) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device.torch_device)
    # fresh zeroed memory that nothing has written to: pages nobody has used yet are not resident
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
