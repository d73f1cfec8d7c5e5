"""The forward pass of one rank: rank 0 tells the others of each step, and gets the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tureen.attention.base import AttentionNeeds
from tureen.attention.choice import find_backend
from tureen.config import Config
from tureen.contract.runner import Batch, Capacity
from tureen.devices.base import DeviceInfo
from tureen.devices.groups import RankGroup
from tureen.errors import InvalidRequest
from tureen.log import Progress, no_progress
from tureen.lora.torch_segments import SegmentAdapters
from tureen.models.config import ModelConfig
from tureen.models.segments import segments_of
from tureen.models.torch_ranked import AttentionPlace, RankedDecoder, attention_places
from tureen.runner import loading, torch_pool
from tureen.runner.forward import ForwardOutput, score_pieces
from tureen.runner.torch_forward import TorchForward, TorchForwardFactory, dtype_name
from tureen.weights.source import ModelSource, model_config

Tell = Callable[[Batch], None]


class RankForward(TorchForward):
    """A Forward of which each rank computes a part."""

    tell: Tell | None = None  # on rank 0: has the other ranks compute a step too
    _unread: Iterator[Tensor] = iter(())

    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        """Computes a step on rank 0, and has the others do so."""
        self.read_rest()
        if self.tell is not None:
            self.tell(Batch(batch.rows))
        output: ForwardOutput = super().run(batch, best_only=best_only)
        self._unread = output.scored
        return output

    def read_rest(self) -> None:
        """Takes from the other ranks what nobody has asked for of the last step: they wait to hand it over."""
        for _ in self._unread:
            pass

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        """Computes another rank's part of a step."""
        inputs, states = self._states(batch)
        if inputs.sampled is not None:
            self._model.logits(states.index_select(0, inputs.sampled))
        for _ in self._scored(states, score_pieces(batch, self._vocab_size)):
            pass


class RankFactory(TorchForwardFactory):
    """Makes the parts of a rank's forward pass."""

    def __init__(
        self,
        device: DeviceInfo,
        dtype: torch.dtype,
        model: ModelConfig,
        capacity: Capacity,
        attention: ModuleType,
        group: RankGroup,
        *,
        progress: Progress = no_progress,
        tell: Tell | None = None,
    ) -> None:
        """tell: see RankForward."""
        super().__init__(device, dtype, model, capacity, attention, progress)
        self._group = group
        self._tell = tell
        self._places = places_of(model, group.rank, group.size)

    def load(self, source: ModelSource, config: Config) -> RankedDecoder:  # type: ignore[override]
        num_bytes = weight_bytes(self.model, self._dtype, self._device, self._group)
        loading.require_memory(num_bytes, dtype_name(self._dtype), self._device)
        place = torch.device(self._device.name)
        with place:
            model = RankedDecoder(self.model, self._dtype, self._group)
        model.load(
            loading.weights(
                source, model_config(source), self.model, load_format=config.load_format, progress=self._progress
            )
        )
        model.finish(self._capacity.context_len, place)
        return model

    def make_cache(self) -> torch_pool.KvPool:
        sizes = {"num_pages": self._capacity.num_pages, "page_size": self._capacity.page_size}
        return torch_pool.allocate_shared(self._places, self._dtype, **sizes, device=self._device)

    def assemble(self, weights: RankedDecoder, cache: torch_pool.KvPool) -> RankForward:  # type: ignore[override]
        attention = self._attention.make_backend([place.shape for place in self._places], cache.keys, cache.values)
        adapters, page_size = SegmentAdapters(weights), self._capacity.page_size
        forward = RankForward(weights, adapters, attention, page_size, self._device, self._dtype)
        forward.tell = self._tell
        return forward

    def value(self, weights: Any, name: str) -> NDArray[np.float32]:
        raise InvalidRequest(f"{name}: no rank has all of it", code="not_supported")


def places_of(model: ModelConfig, rank: int, num_ranks: int) -> list[AttentionPlace]:
    """Returns what a rank's attention backend has, see `attention_places`."""
    return attention_places(model, segments_of(model, rank, num_ranks))


def find_attention(config: Config, model: ModelConfig, device: DeviceInfo, dtype: torch.dtype) -> ModuleType:
    """Finds the attention backend, one that all ranks can have; see find_backend."""
    layers = tuple(dict.fromkeys(place.shape for place in places_of(model, 0, 1)))
    return find_backend(
        config.attention_backend, AttentionNeeds(device.type, dtype_name(dtype), layers, config.page_size)
    )


def weight_bytes(model: ModelConfig, dtype: torch.dtype, device: DeviceInfo, group: RankGroup) -> int:
    """Returns the bytes of the weights of one rank."""
    with torch.device("meta"):
        total = RankedDecoder(model, dtype, group).num_bytes()
    if model.tie_embeddings and device.type == "cpu":  # the head keeps its own layout
        total += model.vocab_size * model.hidden_size * dtype.itemsize // group.size
    return total
