"""Computes an embedding model's states in torch: on a GPU, or in a type that the native kernels have not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from tureen.config import Config
from tureen.devices.base import DeviceInfo
from tureen.models.encoder import EncoderConfig
from tureen.models.torch_encoder import TorchEncoder
from tureen.weights.stored import Stored
from tureen.weights.tensors import as_tensor

Numbers = NDArray[np.int64]

SHARED = 10_000_000_000
"""Floating-point operations of a text from which on the CPU's threads share it: for less, they wait for each other."""


class TorchStates:
    """The `States` of a model in torch."""

    def __init__(self, model: TorchEncoder, config: EncoderConfig, device: DeviceInfo, dtype: torch.dtype) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self._model = model
        self._device = device
        shapes = config.weights().items()
        self._num_layer_weights = sum(math.prod(shape) for name, shape in shapes if name.startswith("layers."))

    @torch.inference_mode()
    def states(self, token_ids: Numbers, positions: Numbers, types: Numbers, starts: Numbers) -> NDArray[np.float32]:
        """Computes each text alone, because torch's products depend on the number of their rows."""
        return np.concatenate(
            [
                self._states(token_ids[start:end], positions[start:end], types[start:end])
                for start, end in itertools.pairwise(starts)
            ]
        )

    def _states(self, token_ids: Numbers, positions: Numbers, types: Numbers) -> NDArray[np.float32]:
        is_shared = 2 * self._num_layer_weights * len(token_ids) >= SHARED
        numbers = (torch.from_numpy(array).to(self._device.name) for array in (token_ids, positions, types))
        with _threads(self._device.num_threads if is_shared else 1):
            states: NDArray[np.float32] = self._model.states(*numbers).float().cpu().numpy()
        return states


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Sets the number of torch's threads, and then restores it: it is the process's, not ours alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(shape: EncoderConfig, config: Config, device: DeviceInfo, weights: Iterable[Stored]) -> TorchStates:
    """Takes over these weights, those of `shape.weights()`."""
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    tensors = {stored.name: as_tensor(stored).to(device.name, dtype) for stored in weights}
    return TorchStates(TorchEncoder(shape, tensors), shape, device, dtype)
