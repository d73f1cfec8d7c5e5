"""Turns pictures and videos into embeddings: runs a model's vision encoder, with native kernels or in torch.

Imports torch only where it computes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tureen.config import Config
from tureen.contract.types import MediaItem
from tureen.devices.base import DeviceInfo
from tureen.errors import RequestFailed, StartupError
from tureen.kernels.cpu import native
from tureen.log import Progress
from tureen.media.base import Normalisation, Vision
from tureen.media.families import find_family
from tureen.registry import find_model
from tureen.runner import loading
from tureen.runner.backend import uses_native, uses_ranks
from tureen.vision.arrays import is_matrix
from tureen.vision.native_arrays import NativeArrays
from tureen.weights.source import ModelSource, preprocessor_config
from tureen.weights.stored import Stored, to_float32
from tureen.weights.vision import iter_vision

if TYPE_CHECKING:
    from tureen.vision.arrays import Array, EncoderArrays
    from tureen.vision.picture_embedder import PictureEmbedder

CPU_PIECE, GPU_PIECE = 300_000_000, 1_000_000_000_000
"""Floating-point operations in a piece of work: a few milliseconds."""
ITEM_BYTES = {"float32": 4, "int16": 2, "bfloat16": 2, "float16": 2}
"""Type -> bytes of a weight."""
QUANTISED = ("scales", "weight_", "input_scale", "activation_scale")
"""Prefixes of the names that quantised checkpoints give to the scales of a matrix."""


class DescribedVision(NamedTuple):
    """The vision encoder of a model as its config and its preprocessor's describe it."""

    vision: Vision
    normalisation: Normalisation
    shapes: dict[str, tuple[int, ...]]  # of the weights, by the names used here


class Encoder:
    """The vision encoder of a model, on one device."""

    def __init__(
        self, embedder: PictureEmbedder, normalisation: Normalisation, arrays: EncoderArrays, piece: int
    ) -> None:
        self._embedder = embedder
        self._normalisation = normalisation
        self._arrays = arrays
        self._piece = piece

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """Yields None after each piece of work, and last float32 [num_rows, hidden_size] as bytes.

        Nothing that is done between two pieces changes the numbers. Raises RequestFailed for an item that the model
        cannot have been meant to get.
        """
        work = self._embedder.embed(self._normalised(item), item.layout)
        done = 0
        while True:
            with self._arrays.computing():
                try:
                    done += next(work)
                except StopIteration as end:
                    embeddings = self._arrays.numpy(end.value)
                    break
            if done >= self._piece:
                done = 0
                yield None
        if len(embeddings) != item.num_rows:
            raise RequestFailed(f"a picture became {len(embeddings)} embeddings, not {item.num_rows}")
        yield embeddings.tobytes()

    def arithmetic(self) -> dict[str, Any]:
        """Returns what decides the last bit of an embedding besides model, settings and code, as plain data."""
        return self._arrays.arithmetic()

    def _normalised(self, item: MediaItem) -> Array:
        """Returns the tiles as the tower takes them, [tiles, 3, height, width]."""
        if (
            len(item.shape) != 4
            or min(item.shape) < 1
            or item.shape[3] != 3
            or math.prod(item.shape) != len(item.pixels)
        ):
            raise RequestFailed("a picture's pixels do not have its shape")
        pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.shape).astype(np.float32)
        scale, mean, std = (np.array(values, np.float32) for values in self._normalisation)
        scaled = (pixels * scale - mean) / std
        return self._arrays.narrowed(self._arrays.constant(scaled.transpose(0, 3, 1, 2)))


def load_encoder(
    source: ModelSource, hf: Mapping[str, Any], config: Config, device: DeviceInfo, progress: Progress
) -> Encoder:
    """Loads the vision encoder of a model that has one. Raises StartupError.

    Its memory is checked before it is taken, and taken from what is free then: load it before the text model, so that
    the KV cache gets what it leaves.
    """
    described = vision, normalisation, shapes = describe(source, hf)
    dtype = _dtype(config, device)
    needed = sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]
    form = f"{dtype} for the vision encoder"
    loading.require_memory(needed, form, device, "serve text alone with --language-model-only")
    arrays, read = _make_arrays(config, device, dtype)
    loaded: dict[str, Any] = {}
    for stored in weights(source, described, config.load_format, progress):
        values = arrays.narrowed(arrays.constant(read(stored)))
        loaded[stored.name] = arrays.matrix(values) if is_matrix(stored.name, stored.shape) else values
    piece = GPU_PIECE if device.type == "cuda" else CPU_PIECE
    embedder: PictureEmbedder = importlib.import_module(vision.module).make(vision, arrays, loaded, piece)
    return Encoder(embedder, normalisation, arrays, piece)


def describe(source: ModelSource, hf: Mapping[str, Any]) -> DescribedVision:
    """Reads the configs of a model that has a vision encoder. Raises StartupError naming what is not understood."""
    vision: Vision = find_model(loading.architecture_of(hf)).parse_vision(hf)
    normalisation = find_family(hf, preprocessor_config(source)).normalisation
    return DescribedVision(vision, normalisation, vision.weights(loading.describe(hf).hidden_size))


def _dtype(config: Config, device: DeviceInfo) -> str:
    """Returns the type to compute in: of matrices and their inputs on a CPU, where all else is float32."""
    if device.type == "cpu":
        return native.matrix_dtype(config.dtype) if _is_native(config, device) else "float32"
    from tureen.devices.dtypes import default_dtype  # noqa: PLC0415 - torch

    return str(default_dtype(device)).removeprefix("torch.") if config.dtype == "auto" else config.dtype


def _is_native(config: Config, device: DeviceInfo) -> bool:
    return uses_native(config, device) and not uses_ranks(config)


def _make_arrays(config: Config, device: DeviceInfo, dtype: str) -> tuple[EncoderArrays, Callable[[Stored], Any]]:
    """Returns what computes, and what reads a weight for it."""
    if _is_native(config, device):
        return NativeArrays(native.require(), device.num_threads, dtype), to_float32
    import torch  # noqa: PLC0415 - only where it computes

    from tureen.vision.torch_arrays import TorchArrays  # noqa: PLC0415 - torch
    from tureen.weights.tensors import as_tensor  # noqa: PLC0415 - torch

    torch.set_num_threads(device.num_threads)
    return TorchArrays(torch.device(device.name), getattr(torch, dtype)), as_tensor


def weights(source: ModelSource, described: DescribedVision, load_format: str, progress: Progress) -> Iterator[Stored]:
    """Yields the weights by the names used here and in their shapes, each once. Raises StartupError for those that are
    missing, unknown or misshapen."""
    vision, _, shapes = described
    if load_format == "dummy":
        tensors = loading.random_weights(shapes)
    else:
        tensors = _renamed(iter_vision(source), vision.local_name)
    missing = dict(shapes)
    for stored in tensors:
        shape = missing.pop(stored.name, None)
        if shape is None or stored.shape[-len(shape) :] != shape or math.prod(stored.shape) != math.prod(shape):
            raise StartupError(
                f"the model's weight {stored.name} has shape {list(stored.shape)}, config.json says "
                f"{'it is absent' if shape is None else list(shape)}; the files do not belong together"
            )
        yield stored._replace(shape=shape)
        progress("load vision weights", len(shapes) - len(missing), len(shapes))
    if missing:
        raise StartupError(
            f"the model lacks {len(missing)} weights of the vision encoder, such as {min(missing)}; download it again, "
            "or serve its text alone with --language-model-only"
        )


def _renamed(tensors: Iterator[Stored], local_name: Callable[[str], str | None]) -> Iterator[Stored]:
    """Yields the weights that are used, by the names used here."""
    for stored in tensors:
        try:
            name = local_name(stored.name)
        except KeyError:
            if stored.name.rpartition(".")[2].startswith(QUANTISED):
                raise StartupError(
                    f"the vision encoder is quantised ({stored.name}), which cannot be read; take a checkpoint in "
                    "which only the text model is quantised, or serve its text alone with --language-model-only",
                    field="model_path",
                ) from None
            raise StartupError(
                f"the model has a weight that its architecture does not: {stored.name}; is config.json its own?"
            ) from None
        if name is not None:
            yield stored._replace(name=name)
