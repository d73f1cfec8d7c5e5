"""Runs an embedding model on one device: a text's token ids become one vector. Imports torch only where it computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.contract.types import Pooling
from tureen.devices.base import DeviceInfo, resolve_device
from tureen.errors import RequestFailed, StartupError
from tureen.extras import require
from tureen.kernels.cpu import native
from tureen.log import Progress
from tureen.models import bert
from tureen.models.bert import BertConfig
from tureen.runner import loading, native_embedder
from tureen.weights.sentence_files import SentenceConfig, read_sentence_config
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, iter_plain

PREFIX = "bert."
"""Stands before the encoder's names in a checkpoint that holds more than the encoder."""
ITEM_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""--dtype -> bytes of a weight."""
NOT_FOR_EMBEDDINGS = (
    "lora_paths", "quantization", "kv_cache_dtype", "max_total_tokens", "model_impl", "load_format",
    "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip
"""Settings of models that write text only."""


class States(Protocol):
    """Computes the last layer's output for a text."""

    dtype: str

    def states(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns it for token ids: [tokens, hidden_size]."""


class EmbedderPlace(NamedTuple):
    """The device and the type that an embedding model computes with."""

    device: str  # as torch writes it: cpu, cuda:0
    dtype: str


class ModelEmbedder:
    """Computes embeddings, one text at a time, so that no number depends on what else is asked for."""

    def __init__(
        self, model: States, config: BertConfig, pooling: Pooling, max_tokens: int, place: EmbedderPlace
    ) -> None:
        self.config = config
        self.pooling = pooling
        self.max_tokens = max_tokens
        self.place = place
        self._model = model

    def embed(self, token_ids: Sequence[int]) -> bytes:
        """Returns a text's embedding, float32 [hidden_size] as bytes, not normalised. Raises RequestFailed where it is
        not finite."""
        states = self._model.states(token_ids)
        vector: NDArray[np.float32] = states.mean(axis=0) if self.pooling == "mean" else states[0]
        if not np.isfinite(vector).all():
            raise RequestFailed("the model made something of this text that is not a number", code="nan_logits")
        return vector.tobytes()


def load_embedder(source: ModelSource, config: Config, progress: Progress) -> ModelEmbedder:
    """Loads a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    refuse_settings(config)
    device = resolve_device(config.device, config.num_threads)
    fault = why_not_native(config, device.type)
    if fault and config.kernels == "native":
        raise StartupError(f"--kernels native: {fault}", field="kernels")
    if fault:
        require(fault, "torch")
    shape = bert.parse(model_config(source))
    sentence = read_sentence_config(source.path)
    max_tokens = _max_tokens(config, sentence, shape.num_positions)
    shapes = shape.weights()
    dtype = "float32" if config.dtype == "auto" else config.dtype
    loading.require_memory(sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype], dtype, device)
    weights = _read(source, shapes, progress)
    states = _torch_states(shape, config, device, weights) if fault else native_embedder.load(shape, device, weights)
    return ModelEmbedder(states, shape, sentence.pooling, max_tokens, EmbedderPlace(device.name, dtype))


def _torch_states(shape: BertConfig, config: Config, device: DeviceInfo, weights: Iterator[Stored]) -> States:
    from tureen.runner import torch_embedder  # noqa: PLC0415 - torch

    return torch_embedder.load(shape, config, device, weights)


def why_not_native(config: Config, device_type: str) -> str:
    """Says what keeps the native kernels from computing; empty where they can."""
    if device_type != "cpu":
        return "--device cuda"
    if config.kernels in ("torch", "tree"):
        return f"--kernels {config.kernels}"
    if config.dtype not in ("auto", "float32"):
        return f"--dtype {config.dtype}, for a model that makes embeddings,"
    return "" if native.is_built() else "an installation without native CPU kernels"


def _max_tokens(config: Config, sentence: SentenceConfig, num_positions: int) -> int:
    """Raises StartupError for more than there are positions."""
    asked = config.context_length
    if asked is not None and asked > num_positions:
        raise StartupError(
            f"--context-length {asked} is more than the model's {num_positions} positions; lower it to that",
            field="context_length",
        )
    return min(asked or sentence.max_tokens or num_positions, num_positions)


def refuse_settings(config: Config) -> None:
    """Raises StartupError for what such a model has not."""
    at_default = Config()
    for name in NOT_FOR_EMBEDDINGS:
        value = getattr(config, name)
        if value != getattr(at_default, name):
            flag = name.replace("_", "-")
            raise StartupError(f"--{flag} {value}: not for a model that makes embeddings; leave it out", field=name)


def _read(source: ModelSource, shapes: Mapping[str, tuple[int, ...]], progress: Progress) -> Iterator[Stored]:
    """Yields each weight once, by the names used here. Raises StartupError for those that are missing, unknown or
    misshapen."""
    missing = dict(shapes)
    for stored in iter_plain(source, lambda name: not name.removeprefix(PREFIX).startswith(bert.UNUSED)):
        name = stored.name.removeprefix(PREFIX)
        shape = missing.pop(name, None)
        if shape != stored.shape:
            raise StartupError(
                f"the model's weight {name} has shape {list(stored.shape)}, config.json says "
                f"{'that there is none' if shape is None else list(shape)}; the files do not belong together"
            )
        yield stored._replace(name=name)
        progress("load weights", len(shapes) - len(missing), len(shapes))
    if missing:
        raise StartupError(f"the model lacks {len(missing)} weights, such as {min(missing)}")
