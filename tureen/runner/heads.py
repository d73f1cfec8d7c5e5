"""Computes what follows the pooling: matrices that make an embedding of a pooled state, or scores. In float32, by
numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError
from tureen.log import get_logger
from tureen.runner.elementwise import ACTIVATIONS, layer_norm
from tureen.runner.kinds import model_kind
from tureen.runner.loading import SCORE
from tureen.weights.gguf import GgufFile
from tureen.weights.mapped import TensorInfo
from tureen.weights.sentence_files import Dense, classifier_of
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, iter_plain, readable, to_float32

Array = NDArray[np.float32]
DENSE_OF_GGUF = ("dense_2", "dense_3")
EMBEDDING_GEMMA = "gemma-embedding"
log = get_logger("runner")


class HeadLayer(NamedTuple):
    """A matrix [outputs, inputs] with a bias, the activation of its result, and a norm of that."""

    weight: Array
    bias: Array | None = None
    activation: str = "identity"
    norm: Array | None = None
    norm_bias: Array | None = None
    norm_eps: float = 1e-5


def apply(layers: Sequence[HeadLayer], state: Array) -> Array:
    """Returns the result of the layers for one pooled state, [hidden_size]."""
    for layer in layers:
        state = layer.weight @ state
        if layer.bias is not None:
            state = state + layer.bias
        state = ACTIVATIONS[layer.activation](state)
        if layer.norm is not None:
            state = layer_norm(state, layer.norm, layer.norm_bias, layer.norm_eps)
    return state


def layers_of(source: ModelSource, size: int) -> list[HeadLayer]:
    """Reads what makes an embedding or scores of a decoder's state of `size` numbers; [] if the state itself is that.
    Raises StartupError."""
    kind, sentence = model_kind(source), source.sentence
    if kind == "classifier":
        return score_layers(source, model_config(source), size)
    if kind == "generator" or not sentence.dense:
        return []
    if sentence.pooling != "last":
        raise StartupError("modules.json: Dense after a mean of a decoder's states is not known", field="model_path")
    return dense_layers(source, size)


def dense_layers(source: ModelSource, size: int) -> list[HeadLayer]:
    """Reads the Dense stages of an embedding model. `size`: of the pooled state. Raises StartupError."""
    if source.gguf is not None:
        return _dense_of_gguf(source.gguf, size)
    layers = []
    for dense in source.sentence.dense:
        if dense.inputs != size:
            raise StartupError(f"model {dense.folder}: in_features is {dense.inputs}, but it gets {size} numbers")
        layers.append(_dense_layer(dense))
        size = dense.outputs
    return layers


def _dense_of_gguf(file: GgufFile, size: int) -> list[HeadLayer]:
    """Reads the Dense stages that llama.cpp calls dense_2 and dense_3. Raises StartupError."""
    layers = []
    for name in (name for name in DENSE_OF_GGUF if f"{name}.weight" in file.tensors):
        info, bias = file.tensors[f"{name}.weight"], file.tensors.get(f"{name}.bias")
        if info.shape[1:] != (size,) or (bias is not None and bias.shape != info.shape[:1]):
            raise StartupError(f"model {file.path}: tensor {name}.weight must have {size} columns")
        layers.append(HeadLayer(_values(file, info), None if bias is None else _values(file, bias)))
        size = info.shape[0]
    if not layers and file.metadata["general.architecture"] == EMBEDDING_GEMMA:
        log.warning(
            "%s lacks the two dense layers of EmbeddingGemma, so embeddings are not those of sentence-transformers; "
            "take the safetensors, or convert with --sentence-transformers-dense-modules",
            file.path.name,
        )
    return layers


def _values(file: GgufFile, info: TensorInfo) -> Array:
    return to_float32(readable(Stored(info.name, info.shape, info.encoding.name, file.raw(info))))


def _dense_layer(dense: Dense) -> HeadLayer:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
    if dense.has_bias:
        shapes["linear.bias"] = (dense.outputs,)
    folder = ModelSource(dense.folder.name, dense.folder, "safetensors")
    weights = _exact(iter_plain(folder, lambda name: True), shapes)
    return HeadLayer(weights["linear.weight"], weights.get("linear.bias"), dense.activation)


def score_layers(source: ModelSource, hf: Mapping[str, Any], size: int) -> list[HeadLayer]:
    """Reads the matrix that makes scores of a decoder's last state. Raises StartupError."""
    count = len(classifier_of(hf, source.sentence).labels)
    shapes: dict[str, tuple[int, ...]] = {"score.weight": (count, size)}
    weights = _exact(iter_plain(source, lambda name: name.startswith(SCORE)), shapes)
    return [HeadLayer(weights["score.weight"])]


def _exact(tensors: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Returns the values of the tensors. Raises StartupError unless their names and shapes are those of `shapes`."""
    by_name: dict[str, Stored] = {stored.name: stored for stored in tensors}
    for name in sorted({*by_name, *shapes}):
        shape = by_name[name].shape if name in by_name else None
        if shape != shapes.get(name):
            raise StartupError(
                f"the model's weight {name} has shape {list(shape) if shape else None}, the configuration says "
                f"{list(shapes[name]) if name in shapes else None}; the files do not belong together"
            )
    return {name: to_float32(stored) for name, stored in by_name.items()}
