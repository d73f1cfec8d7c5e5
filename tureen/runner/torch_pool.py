"""The torch tensors that hold keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tureen.devices.base import DeviceInfo
from tureen.models.config import KvLayer, ModelConfig

if TYPE_CHECKING:
    from tureen.models.torch_ranked import AttentionPlace


class KvPool(NamedTuple):
    """Tensors of keys and values: keys[layer], values[layer]: [num_pages, page_size, kv_heads, head_dim], zeros at
    first; one tensor is both where values are dimensions of the keys. states: [states, numbers] of layers without
    attention."""

    keys: list[Tensor]
    values: list[Tensor]
    states: Tensor | None = None


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that K and V of one token take in all layers."""
    return sum(layer.numbers for layer in model.kv_layers) * dtype.itemsize


def allocate(
    layers: Iterable[KvLayer],
    dtype: torch.dtype,
    *,
    num_pages: int,
    page_size: int,
    device: DeviceInfo,
    num_window_pages: int = 0,
    state_shape: tuple[int, int] = (0, 0),
) -> KvPool:
    """Allocates the tensors of these layers on the device. num_window_pages: of layers with a window; 0: num_pages.
    state_shape: states, and the numbers of each."""
    keys, values = [], []
    for layer in layers:
        shape = (
            num_window_pages if layer.has_window and num_window_pages else num_pages,
            page_size,
            layer.heads,
            layer.head_dim,
        )
        keys.append(_zeros(shape, dtype, device))
        values.append(_zeros(shape, dtype, device) if layer.values_from < 0 else keys[-1])
    return KvPool(keys, values, _zeros(state_shape, torch.float32, device) if state_shape[0] else None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: DeviceInfo) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device.name)
    # fresh zeroed memory that nothing has written to: unused pages are not resident
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def shared_bytes_per_token(places: Iterable[AttentionPlace], dtype: torch.dtype) -> int:
    """Returns the bytes that K and V of one token take in these places of attention."""
    sizes = {place.stored: place.shape.num_kv_heads * place.shape.head_dim for place in places}
    return 2 * sum(sizes.values()) * dtype.itemsize


def allocate_shared(
    places: Sequence[AttentionPlace], dtype: torch.dtype, *, num_pages: int, page_size: int, device: DeviceInfo
) -> KvPool:
    """Allocates the tensors of a rank's places of attention, by their order; those with the same heads are one."""
    shapes = {place.stored: (num_pages, page_size, place.shape.num_kv_heads, place.shape.head_dim) for place in places}
    keys, values = ({stored: _zeros(shape, dtype, device) for stored, shape in shapes.items()} for _ in range(2))
    return KvPool([keys[place.stored] for place in places], [values[place.stored] for place in places])
