"""Runs an embedding model on one device, in torch: a text's token ids become one vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tureen.config import Config
from tureen.contract.types import Pooling
from tureen.devices.base import resolve_device
from tureen.errors import RequestFailed, StartupError
from tureen.log import Progress
from tureen.models import bert
from tureen.models.bert import BertConfig
from tureen.models.torch_bert import TorchBert
from tureen.runner import loading
from tureen.weights.sentence_files import SentenceConfig, read_sentence_config
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import iter_plain
from tureen.weights.tensors import as_tensor

PREFIX = "bert."
"""Stands before the encoder's names in a checkpoint that holds more than the encoder."""
SHARED = 10_000_000_000
"""Floating-point operations of a text from which on the CPU's threads share it: for less, they wait for each other."""


class EmbedderPlace(NamedTuple):
    """The device and the type that an embedding model computes with."""

    device: str  # as torch writes it: cpu, cuda:0
    dtype: str
    num_threads: int


class ModelEmbedder:
    """Computes embeddings, one text at a time, so that no number depends on what else is asked for."""

    def __init__(
        self, model: TorchBert, config: BertConfig, pooling: Pooling, max_tokens: int, place: EmbedderPlace
    ) -> None:
        self.config = config
        self.pooling = pooling
        self.max_tokens = max_tokens
        self.place = place
        self._model = model
        shapes = config.weights().items()
        self._num_layer_weights = sum(math.prod(shape) for name, shape in shapes if not name.startswith("embeddings."))

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> bytes:
        """Returns a text's embedding, float32 [hidden_size] as bytes, not normalised. Raises RequestFailed where it is
        not finite."""
        is_shared = 2 * self._num_layer_weights * len(token_ids) >= SHARED
        ids = torch.tensor(token_ids, device=self.place.device)
        with _threads(self.place.num_threads if is_shared else 1):
            states = self._model.states(ids).float()
        vector = states.mean(dim=0) if self.pooling == "mean" else states[0]
        if not bool(torch.isfinite(vector).all()):
            raise RequestFailed("the model made something of this text that is not a number", code="nan_logits")
        return vector.cpu().numpy().tobytes()


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Has torch compute with so many threads, and then as before: the number is the process's, not ours alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_embedder(source: ModelSource, config: Config, progress: Progress) -> ModelEmbedder:
    """Loads a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    _refuse_settings(config)
    device = resolve_device(config.device, config.num_threads)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    shape = bert.parse(model_config(source))
    sentence = read_sentence_config(source.path)
    max_tokens = _max_tokens(config, sentence, shape.num_positions)
    shapes = shape.weights()
    place = EmbedderPlace(device.name, str(dtype).removeprefix("torch."), device.num_threads)
    loading.require_memory(sum(map(math.prod, shapes.values())) * dtype.itemsize, place.dtype, device)
    weights = {name: tensor.to(place.device, dtype) for name, tensor in _read(source, shapes, progress)}
    return ModelEmbedder(TorchBert(shape, weights), shape, sentence.pooling, max_tokens, place)


def _max_tokens(config: Config, sentence: SentenceConfig, num_positions: int) -> int:
    """Raises StartupError for more than there are positions."""
    asked = config.context_length
    if asked is not None and asked > num_positions:
        raise StartupError(
            f"--context-length {asked} is more than the model's {num_positions} positions; lower it to that",
            field="context_length",
        )
    return min(asked or sentence.max_tokens or num_positions, num_positions)


def _refuse_settings(config: Config) -> None:
    """Raises StartupError for what such a model has not."""
    refused = {
        "lora_paths": bool(config.lora_paths),
        "quantization": config.quantization is not None,
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "max_total_tokens": config.max_total_tokens is not None,
        "kernels": config.kernels == "native",
        "model_impl": config.model_impl != "auto",
        "load_format": config.load_format != "auto",
    }
    for name, is_set in refused.items():
        if is_set:
            flag, value = name.replace("_", "-"), getattr(config, name)
            raise StartupError(f"--{flag} {value}: not for a model that makes embeddings; leave it out", field=name)


def _read(
    source: ModelSource, shapes: Mapping[str, tuple[int, ...]], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight once. Raises StartupError for those that are missing, unknown or misshapen."""
    missing = dict(shapes)
    for stored in iter_plain(source, lambda name: not name.removeprefix(PREFIX).startswith(bert.UNUSED)):
        name = stored.name.removeprefix(PREFIX)
        shape = missing.pop(name, None)
        if shape != stored.shape:
            raise StartupError(
                f"the model's weight {name} has shape {list(stored.shape)}, config.json says "
                f"{'that there is none' if shape is None else list(shape)}; the files do not belong together"
            )
        yield name, as_tensor(stored)
        progress("load weights", len(shapes) - len(missing), len(shapes))
    if missing:
        raise StartupError(f"the model lacks {len(missing)} weights, such as {min(missing)}")
