"""Applies low-rank adapters where ranks compute segments of the layers: each segment has its part of the factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tureen.lora.adapter import Adapter, Factors
from tureen.lora.torch_adapters import StepAdapters
from tureen.models.config import ModelConfig
from tureen.models.segments import Segment, cut, is_summed
from tureen.models.torch_ranked import RankedDecoder


class SegmentAdapters:
    """The adapters of a rank's segments; see StepAdapters."""

    def __init__(self, model: RankedDecoder) -> None:
        self._config = model.config
        self._segments = [(segment, StepAdapters(model.linears(segment))) for segment in model.segments]

    def load(self, number: int, adapter: Adapter) -> None:
        for segment, own in self._segments:
            parts = {module: part_of(self._config, segment, module, factors) for module, factors in adapter.items()}
            own.load(number, {module: factors for module, factors in parts.items() if module in own.modules})

    def unload(self, number: int) -> None:
        for _, own in self._segments:
            own.unload(number)

    def select(self, numbers: Sequence[int], device: torch.device) -> None:
        for _, own in self._segments:
            own.select(numbers, device)


def part_of(config: ModelConfig, segment: Segment, module: str, factors: Factors) -> Factors:
    """Returns a segment's part of a module's factors: of its inputs where the segments' results are added, else of its
    outputs."""
    index = cut(config, segment, f"{module}.weight")
    if is_summed(module):
        return Factors(factors.down[index], factors.up)
    return Factors(factors.down, factors.up[index])
