"""Runs an encoder on one device: a text's token ids become an embedding or scores. Imports torch only where it
computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.contract.runner import TextToEmbed
from tureen.contract.types import Pooling
from tureen.devices.base import DeviceInfo, resolve_device
from tureen.errors import RequestFailed, StartupError, echo
from tureen.extras import require
from tureen.kernels.cpu import native
from tureen.log import Progress
from tureen.models.encoder import UNUSED, EncoderConfig
from tureen.registry import find_encoder
from tureen.runner import heads as head_layers
from tureen.runner import loading, native_embedder
from tureen.runner.heads import HeadLayer, dense_layers
from tureen.weights.gguf_encoders import encoder_name
from tureen.weights.sentence_files import SentenceConfig, classifier_of
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, iter_plain, to_float32

Numbers = NDArray[np.int64]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Type that torch computes in -> bytes of a weight."""
PLACES = {"cls": 0, "last": -1}
"""Pooling -> the token whose state it takes."""
NOT_FOR_EMBEDDINGS = (
    "lora_paths", "quantization", "kv_cache_dtype", "max_total_tokens", "model_impl", "load_format",
    "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip
"""Settings of models that write text only."""


class States(Protocol):
    """Computes the last layer's output for texts."""

    def states(self, token_ids: Numbers, positions: Numbers, types: Numbers, starts: Numbers) -> NDArray[np.float32]:
        """Returns it for token ids, rows of the table of positions, and token types, each [tokens]:
        [tokens, hidden_size]. starts: of each text, and the number of all tokens."""


class EmbedderPlace(NamedTuple):
    """The device and the type that an embedding model computes with."""

    device: str  # as torch writes it: cpu, cuda:0
    dtype: str


class DescribedEncoder(NamedTuple):
    """An encoder as its config describes it."""

    shape: EncoderConfig
    renames: Sequence[tuple[str, str]]  # parts of names in checkpoints -> those used here
    shapes: dict[str, tuple[int, ...]]  # of the weights, by the names used here


class ModelEmbedder:
    """Computes embeddings or scores. No number depends on the other texts that are computed at the same time."""

    def __init__(
        self,
        model: States,
        config: EncoderConfig,
        pooling: Pooling,
        max_tokens: int,
        place: EmbedderPlace,
        layers: Sequence[HeadLayer] = (),
    ) -> None:
        """layers: those that follow the pooling."""
        self.config = config
        self.pooling = pooling
        self.max_tokens = max_tokens
        self.place = place
        self._model = model
        self._layers = layers

    def embed(self, texts: Sequence[TextToEmbed]) -> list[bytes | RequestFailed]:
        """Returns the texts' embeddings or a classifier's logits, float32 as bytes, as they are after the last layer;
        an error for a text with a number that is not finite."""
        ids = [np.asarray(text.token_ids, np.int64) for text in texts]
        positions = [_positions(own, self.config.padding) for own in ids]
        starts = np.cumsum([0, *map(len, ids)])
        types = np.zeros(starts[-1], np.int64)
        for text, start, end in zip(texts, starts, starts[1:], strict=False):
            if text.second_start and self.config.has_pair_types:
                types[start + text.second_start : end] = 1
        states = self._model.states(np.concatenate(ids), np.concatenate(positions), types, starts)
        return [self._vector(states[start:end]) for start, end in itertools.pairwise(starts)]

    def _vector(self, states: NDArray[np.float32]) -> bytes | RequestFailed:
        pooled: NDArray[np.float32] = states.mean(axis=0) if self.pooling == "mean" else states[PLACES[self.pooling]]
        vector = head_layers.apply(self._layers, pooled)
        if not np.isfinite(vector).all():
            return RequestFailed("the model returned non-finite numbers for this text", code="nan_logits")
        return vector.tobytes()


def _positions(token_ids: NDArray[np.int64], padding: int | None) -> NDArray[np.int64]:
    if padding is None:
        return np.arange(len(token_ids))
    is_text = token_ids != padding
    return padding + np.where(is_text, np.cumsum(is_text), 0)


def load_embedder(source: ModelSource, config: Config, progress: Progress) -> ModelEmbedder:
    """Loads an encoder that is on disk. Memory is checked before it is taken. Raises StartupError."""
    refuse_settings(config)
    device = resolve_device(config.device, config.num_threads)
    fault = why_not_native(config, device.type)
    if fault and config.kernels == "native":
        raise StartupError(f"--kernels native: {fault}", field="kernels")
    if fault:
        require(fault, "torch")
    described, sentence = describe(source), source.sentence
    shape = described.shape
    max_tokens = _max_tokens(config, sentence, shape.max_tokens)
    in_torch = "float32" if config.dtype == "auto" else config.dtype
    dtype = in_torch if fault else native.matrix_dtype(config.dtype)
    loading.require_memory(_num_bytes(described.shapes, dtype, is_native=not fault), dtype, device)
    head: dict[str, NDArray[np.float32]] = {}
    body = _without_head(weights(source, described, progress), head)
    states: States = (
        _torch_states(shape, config, device, body) if fault else native_embedder.load(shape, device, dtype, body)
    )
    pooling = shape.head.pooling if shape.head else sentence.pooling or "mean"
    layers = _head_layers(shape, head) if shape.head else dense_layers(source, shape.hidden_size)
    return ModelEmbedder(states, shape, pooling, max_tokens, EmbedderPlace(device.name, dtype), layers)


def _num_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: str, *, is_native: bool) -> int:
    if is_native:
        return native_embedder.num_bytes(shapes, dtype)
    return sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]


def describe(source: ModelSource) -> DescribedEncoder:
    """Reads an encoder's config. Raises StartupError naming what is not understood."""
    hf = model_config(source)
    family = find_encoder(loading.architecture_of(hf))
    shape: EncoderConfig = family.parse(hf)
    shapes = shape.weights(len(classifier_of(hf, source.sentence).labels) if shape.head else 0)
    return DescribedEncoder(shape, family.RENAMES, shapes)


def _without_head(weights: Iterator[Stored], head: dict[str, NDArray[np.float32]]) -> Iterator[Stored]:
    """Yields the weights but those of the head, whose values are put into `head` by their names."""
    for stored in weights:
        if stored.name.startswith("head."):
            head[stored.name] = to_float32(stored)
        else:
            yield stored


def _head_layers(shape: EncoderConfig, head: Mapping[str, NDArray[np.float32]]) -> list[HeadLayer]:
    assert shape.head is not None
    layers = []
    if shape.head.dense:
        norm = head.get("head.norm.weight"), head.get("head.norm.bias"), shape.norm_eps
        layers.append(HeadLayer(head["head.dense.weight"], head.get("head.dense.bias"), shape.head.dense, *norm))
    return [*layers, HeadLayer(head["head.out.weight"], head["head.out.bias"])]


def _torch_states(shape: EncoderConfig, config: Config, device: DeviceInfo, weights: Iterator[Stored]) -> States:
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
            raise StartupError(f"--{flag} {value}: not for an embedding model; leave it out", field=name)


def _stored(source: ModelSource, renames: Iterable[tuple[str, str]], unused: tuple[str, ...]) -> Iterator[Stored]:
    """Yields the weights by the names used here, but those whose names have an `unused` beginning. Raises
    StartupError."""
    file = source.gguf
    if file is None:
        for stored in iter_plain(source, lambda name: not loading.replaced(name, renames).startswith(unused)):
            yield stored._replace(name=loading.replaced(stored.name, renames))
        return
    for info in file.tensors.values():
        name = encoder_name(info.name, file.metadata["general.architecture"])
        if name is None:
            raise StartupError(f"model {file.path}: tensor {echo(info.name)} is not part of a known architecture")
        if name.startswith(unused):
            continue
        yield Stored(name, info.shape, info.encoding.name, file.raw(info))
        file.release(info)


def weights(source: ModelSource, described: DescribedEncoder, progress: Progress) -> Iterator[Stored]:
    """Yields each weight once, by the names used here. Raises StartupError for those that are missing, unknown or
    misshapen."""
    shape, renames, shapes = described
    missing = dict(shapes)
    unused = UNUSED if shape.head else (*UNUSED, "head.")
    for stored in loading.unstacked(_stored(source, renames, unused), shapes):
        expected = missing.pop(stored.name, None)
        if expected != stored.shape:
            raise StartupError(
                f"the model's weight {stored.name} has shape {list(stored.shape)}, config.json says "
                f"{'it is absent' if expected is None else list(expected)}; the files do not belong together"
            )
        is_less_one = shape.unit_offset_norm and source.gguf is None and stored.name.endswith("norm.weight")
        yield stored._replace(offset=stored.offset + 1) if is_less_one else stored
        progress("load weights", len(shapes) - len(missing), len(shapes))
    if missing:
        raise StartupError(f"the model lacks {len(missing)} weights, such as {min(missing)}")
