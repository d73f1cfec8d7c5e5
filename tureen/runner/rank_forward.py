"""The forward pass of one rank: rank 0 tells the others of each step, and gets the logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

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
from tureen.models.segments import segments_of, why_not
from tureen.models.torch_ranked import AttentionPlace, RankedDecoder, attention_places
from tureen.runner import loading, torch_pool
from tureen.runner.forward import ForwardOutput, score_pieces
from tureen.runner.torch_forward import TorchForward, TorchForwardFactory, dtype_name, head_copy_bytes
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
        """Reads the unread results of the last step from the other ranks, which wait to send them."""
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
    """Makes the parts of a rank's forward pass, and says beforehand what they take."""

    field: ClassVar[str] = "tensor_parallel_size"  # the setting of the number of ranks
    refused: ClassVar[dict[str, str]] = {}  # operations of a runner that such ranks do not have, in words

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

    @staticmethod
    def why_not(model: ModelConfig, num_ranks: int) -> str:
        """Says why a number of ranks cannot compute a model, and which numbers can; "" where it can."""
        return why_not(model, num_ranks)

    @staticmethod
    def find_attention(config: Config, model: ModelConfig, device: DeviceInfo, dtype: torch.dtype) -> ModuleType:
        """Finds the attention backend, one that all ranks can have; see find_backend."""
        layers = tuple(dict.fromkeys(place.shape for place in _places(model, RankGroup(0, 1))))
        return find_backend(
            config.attention_backend, AttentionNeeds(device.type, dtype_name(dtype), layers, config.page_size)
        )

    @staticmethod
    def token_bytes(model: ModelConfig, dtype: torch.dtype, group: RankGroup) -> int:
        """Returns the bytes that K and V of one token take on one rank."""
        return torch_pool.shared_bytes_per_token(_places(model, group), dtype)

    @classmethod
    def weight_bytes(cls, model: ModelConfig, dtype: torch.dtype, device: DeviceInfo, group: RankGroup) -> int:
        """Returns the bytes of the weights of one rank."""
        with torch.device("meta"):
            num_bytes: int = cls.make_model(model, dtype, group).num_bytes()
        return num_bytes + cls.head_copy_bytes(model, dtype, device, group)

    @staticmethod
    def head_copy_bytes(model: ModelConfig, dtype: torch.dtype, device: DeviceInfo, group: RankGroup) -> int:
        """Returns the bytes of a rank's head that are not in `num_bytes`."""
        return head_copy_bytes(model, dtype, device) // group.size

    @staticmethod
    def make_model(model: ModelConfig, dtype: torch.dtype, group: RankGroup) -> Any:
        """Makes the rank's part of the model, on torch's default device."""
        return RankedDecoder(model, dtype, group)

    def load(self, source: ModelSource, config: Config) -> Any:
        num_bytes = self.weight_bytes(self.model, self._dtype, self._device, self._group)
        loading.require_memory(num_bytes, dtype_name(self._dtype), self._device)
        place = torch.device(self._device.name)
        with place:
            model = self.make_model(self.model, self._dtype, self._group)
        model.load(
            loading.weights(
                source, model_config(source), self.model, load_format=config.load_format, progress=self._progress
            )
        )
        model.finish(self.capacity.context_len, place)
        return model

    def make_cache(self) -> torch_pool.KvPool:
        sizes = {"num_pages": self.capacity.num_pages, "page_size": self.capacity.page_size}
        places = _places(self.model, self._group)
        return torch_pool.allocate_shared(places, self._dtype, **sizes, device=self._device)

    def assemble(self, weights: RankedDecoder, cache: torch_pool.KvPool) -> RankForward:  # type: ignore[override]
        shapes = [place.shape for place in _places(self.model, self._group)]
        attention = self._attention.make_backend(shapes, cache.keys, cache.values)
        adapters, page_size = SegmentAdapters(weights), self.capacity.page_size
        forward = RankForward(weights, adapters, attention, page_size, self._device, self._dtype)
        forward.tell = self._tell
        return forward

    def value(self, weights: Any, name: str) -> NDArray[np.float32]:
        raise InvalidRequest(f"{name}: no rank has all of it", code="not_supported")


def factory_of(config: Config) -> type[RankFactory]:
    """Chooses how ranks share a model: each has a part of every layer, or some of the layers."""
    if config.pipeline_parallel_size == 1:
        return RankFactory
    factory: type[RankFactory] = importlib.import_module("tureen.runner.stage_forward").StageFactory
    return factory


def _places(model: ModelConfig, group: RankGroup) -> list[AttentionPlace]:
    """Returns what a rank's attention backend has, see `attention_places`."""
    return attention_places(model, segments_of(model, group.rank, group.size))
