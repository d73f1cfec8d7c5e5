"""The torch tensors that hold keys and values."""

from __future__ import annotations

import math
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.devices.base import DeviceInfo
from tureen.models.config import ModelConfig


class KvPool(NamedTuple):
    """Tensors of keys and values: keys[layer], values[layer]: [num_pages, page_size, kv_heads, head_dim], zeros at
    first."""

    keys: list[Tensor]
    values: list[Tensor]


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that K and V of one token take in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def allocate(model: ModelConfig, dtype: torch.dtype, *, num_pages: int, page_size: int, device: DeviceInfo) -> KvPool:
    """Allocates the tensors of all layers on the device."""
    shape = (num_pages, page_size, model.num_kv_heads, model.head_dim)
    tensors = [_zeros(shape, dtype, device) for _ in range(2 * model.num_layers)]
    return KvPool(tensors[::2], tensors[1::2])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: DeviceInfo) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device.name)
    # fresh zeroed memory that nothing has written to: pages nobody has used yet are not resident
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
