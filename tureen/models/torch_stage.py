"""The stages of a pipeline: each computes some layers of a decoder, and passes the hidden states on."""

from __future__ import annotations

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, ModelInput
from tureen.devices.groups import RankGroup
from tureen.models.config import ModelConfig
from tureen.models.stages import layers_of
from tureen.models.torch_decoder import DecoderLayers, DecoderModel


class FirstStage(DecoderModel):
    """The first layers of a decoder, with the embedding, the final norm and the head: the last stage's hidden states
    come back to it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: RankGroup) -> None:
        super().__init__(config, dtype, layers_of(config, 0, group.size))
        self._group = group

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        states = super().forward(inputs, attention)
        self._group.send(states, 1)
        return self._group.receive(torch.empty_like(states), self._group.size - 1)


class LaterStage(DecoderLayers):
    """Other layers of a decoder, and nothing else."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: RankGroup) -> None:
        super().__init__(config, layers_of(config, group.rank, group.size), dtype)
        self._dtype = dtype
        self._group = group

    def forward(self, inputs: ModelInput, attention: AttentionBackend) -> Tensor:
        """Returns the hidden states [tokens, hidden_size] after these layers. `attention.plan(inputs)` has been
        called."""
        shape = (len(inputs.token_ids), self.config.hidden_size)
        place = torch.empty(shape, dtype=self._dtype, device=inputs.token_ids.device)
        states = self._compute(self._group.receive(place, self._group.rank - 1), inputs, attention)
        self._group.send(states, (self._group.rank + 1) % self._group.size)
        return states
