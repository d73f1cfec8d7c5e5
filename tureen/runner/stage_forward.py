"""The forward pass of one stage of a pipeline: rank 0 has the first, and gets the hidden states of the last."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch

from tureen.config import Config
from tureen.contract.runner import Batch
from tureen.devices.base import DeviceInfo
from tureen.devices.groups import RankGroup
from tureen.lora.adapter import Adapter
from tureen.lora.torch_adapters import StepAdapters
from tureen.models.config import ModelConfig
from tureen.models.stages import layers_of, why_not
from tureen.models.torch_decoder import layer_shape
from tureen.models.torch_stage import FirstStage, LaterStage
from tureen.runner import torch_forward, torch_pool
from tureen.runner.rank_forward import RankFactory, RankForward


class StageForward(RankForward):
    """A Forward of which each rank computes some layers, one rank after another."""

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        self._states(batch)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        assert isinstance(self._adapters, StepAdapters)
        modules = self._adapters.modules
        self._adapters.load(number, {module: factors for module, factors in adapter.items() if module in modules})


class StageFactory(RankFactory):
    """Makes the parts of a stage's forward pass."""

    field: ClassVar[str] = "pipeline_parallel_size"
    refused: ClassVar[dict[str, str]] = {
        "start_expert_record": "count the tokens of experts: each rank has some of the layers"
    }

    @staticmethod
    def why_not(model: ModelConfig, num_ranks: int) -> str:
        return why_not(model, num_ranks)

    @staticmethod
    def find_attention(config: Config, model: ModelConfig, device: DeviceInfo, dtype: torch.dtype) -> ModuleType:
        return torch_forward.find_attention(config, model, device, dtype)

    @staticmethod
    def token_bytes(model: ModelConfig, dtype: torch.dtype, group: RankGroup) -> int:
        return (
            torch_pool.bytes_per_token(model, dtype) * len(layers_of(model, group.rank, group.size)) // model.num_layers
        )

    @staticmethod
    def head_copy_bytes(model: ModelConfig, dtype: torch.dtype, device: DeviceInfo, group: RankGroup) -> int:
        return 0 if group.rank else torch_forward.head_copy_bytes(model, dtype, device)

    @staticmethod
    def make_model(model: ModelConfig, dtype: torch.dtype, group: RankGroup) -> Any:
        return (LaterStage if group.rank else FirstStage)(model, dtype, group)

    def make_cache(self) -> torch_pool.KvPool:
        layers = self.model.kv_layers[: len(self._layers)]
        return torch_pool.allocate(
            layers,
            self._dtype,
            num_pages=self.capacity.num_pages,
            page_size=self.capacity.page_size,
            device=self._device,
        )

    @property
    def _layers(self) -> range:
        return layers_of(self.model, self._group.rank, self._group.size)

    def assemble(self, weights: Any, cache: torch_pool.KvPool) -> StageForward:
        shapes = [layer_shape(self.model, layer) for layer in self._layers]
        attention = self._attention.make_backend(shapes, cache.keys, cache.values)
        adapters, page_size = StepAdapters(weights.linears()), self.capacity.page_size
        forward = StageForward(weights, adapters, attention, page_size, self._device, self._dtype)
        forward.tell = self._tell
        return forward
