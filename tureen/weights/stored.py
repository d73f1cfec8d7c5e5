"""Yields a model's weights one by one as they are stored, under Hugging Face names, whatever file they are in. No
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.registry import find_quantisation
from tureen.weights.gguf import ENCODINGS, GgufFile
from tureen.weights.gguf_names import IN_CONFIG, INTERLEAVED, UNIT_OFFSET, XIELU, hf_name, layer_of
from tureen.weights.gguf_quants import dequantize
from tureen.weights.gguf_widen import ENCODINGS as WIDE_ENCODINGS
from tureen.weights.gguf_widen import WIDENED, require_tables, widen
from tureen.weights.mapped import TensorInfo
from tureen.weights.modules import Module, modules
from tureen.weights.safetensors import SafetensorsFile, weight_files
from tureen.weights.source import ModelSource

RENAMES: Final = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
"""Prefixes of checkpoint names -> what they are called here; for language models inside larger ones, and for models
that were saved without a head."""
PARTS: Final = (
    *("vision_tower.", "multi_modal_projector.", "mm_projector.", "image_newline", "visual."),
    *("vision_model.", "connector.", "embed_vision."),
)
VISION: Final = tuple(f"{prefix}{part}" for prefix in ("", "model.") for part in PARTS)
"""Prefixes of the weights of the vision encoder, which a text model has no use for."""
UNREAD: Final = VISION + tuple(
    f"{prefix}{part}" for prefix in ("", "model.") for part in ("audio_tower.", "embed_audio.")
)
"""Prefixes of weights that a text model does not read: VISION and parts that are not supported."""
BY_NAME: Final = {encoding.name: encoding for encoding in ENCODINGS.values()} | WIDE_ENCODINGS


class Stored(NamedTuple):
    """One weight: its values are those of `data` with `offset` added to each."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    encoding: str  # F32, F16, BF16, or a block format: those of gguf_quants.py
    content: NDArray[np.uint8] | Callable[[], NDArray[np.uint8]]  # see `data`
    row_order: NDArray[np.int64] | None = None  # [shape[0]]: the stored row of each row; None = as stored
    offset: float = 0.0

    @property
    def data(self) -> NDArray[np.uint8]:
        """Returns the stored bytes, row after row: a view of the mapped file, or made anew at each call."""
        return self.content() if callable(self.content) else self.content


def iter_stored(source: ModelSource, config: Mapping[str, Any]) -> Iterator[Stored]:
    """Yields every weight of a text model; `config` is `model_config(source)`. Values are those of a Hugging Face
    checkpoint.

    Nothing is read before `data` is; its pages are given back when the next weight is asked for. Raises StartupError
    naming the file and the fault.
    """
    if source.gguf is not None:
        return map(readable, _of_gguf(source.gguf, config.get("text_config", config)))
    settings = _quantisation(config) or _quantisation(config.get("text_config") or {})
    convert = find_quantisation(settings.get("quant_method")).reader(settings) if settings else None
    return _of_folder(source.path, convert)


def iter_plain(source: ModelSource, is_wanted: Callable[[str], bool]) -> Iterator[Stored]:
    """Yields the folder's weights that are not quantised and are wanted, by the file's own names; otherwise as
    `iter_stored`."""
    for path in weight_files(source.path):
        file = SafetensorsFile(path)
        for info in file.tensors.values():
            if is_wanted(info.name):
                yield _plain(file, info, info.name)
                file.release(info)


def to_float32(stored: Stored) -> NDArray[np.float32]:
    """Returns the values in float32 and in `shape`, as a copy."""
    encoding = BY_NAME[stored.encoding]
    raw = in_order(stored)
    values = np.empty(raw.size // encoding.num_bytes * encoding.block_len, np.float32)
    dequantize(raw, encoding, values)
    if stored.offset:
        values += np.float32(stored.offset)
    return values.reshape(stored.shape)


def in_order(stored: Stored) -> NDArray[np.uint8]:
    """Returns the stored bytes with the rows in the order in which they are wanted. Flat; a copy only if rows are
    moved."""
    if stored.row_order is None:
        return stored.data
    encoding = BY_NAME[stored.encoding]
    row_bytes = math.prod(stored.shape[1:]) // encoding.block_len * encoding.num_bytes
    return stored.data.reshape(-1, row_bytes)[stored.row_order].reshape(-1)


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(settings, dict):
        raise StartupError(f"config.json: quantization_config: must be an object, got {echo(settings)}")
    return settings


def _of_folder(folder: Path, convert: Callable[[Module], Stored | None] | None) -> Iterator[Stored]:
    """Yields a folder's weights. `convert` makes a module's next weight of the tensors that it takes; the others are
    plain."""
    for module in modules(folder):
        if f"{module.name}.".startswith(UNREAD):
            continue
        while convert is not None and (weight := convert(module)) is not None:
            yield weight._replace(name=local_name(weight.name))
        for file, info in module.parts.values():
            if info.name.startswith(UNREAD) or info.name.endswith("rotary_emb.inv_freq"):
                continue
            yield _plain(file, info, local_name(info.name))
            file.release(info)
        module.release()


def _plain(file: SafetensorsFile, info: TensorInfo, name: str) -> Stored:
    if info.encoding.name not in BY_NAME:
        raise StartupError(
            f"model {file.path}: tensor {echo(info.name)} has type {info.encoding.name}, which cannot be read "
            "(F32, F16 and BF16 can); use a checkpoint in one of these, or a GGUF file"
        )
    return Stored(name, info.shape, info.encoding.name, file.raw(info))


def local_name(name: str) -> str:
    """Returns the name used here for a checkpoint's weight."""
    for prefix, ours in RENAMES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _of_gguf(file: GgufFile, config: Mapping[str, Any]) -> Iterator[Stored]:
    model_type = config["model_type"]
    is_plus_one = model_type in UNIT_OFFSET
    heads = {}
    if model_type in INTERLEAVED:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for info in file.tensors.values():
        if info.name in IN_CONFIG or _guesses_ahead(info.name, config):
            continue
        name = hf_name(info.name, model_type)
        if name is None:
            raise StartupError(f"model {file.path}: tensor {echo(info.name)} is not part of a known architecture")
        offset = -1.0 if is_plus_one and is_offset(name) else 0.0
        order = row_order(file.path, info, heads.get(info.name.split(".")[-2]))
        stored = Stored(name, _shape(info, name), info.encoding.name, file.raw(info), order, offset)
        if name.endswith(".A_log"):
            stored = _log_decay(file.path, stored)
        yield from _experts(file.path, stored) if "*" in name else (stored,)
        file.release(info)
    yield from _of_metadata(file, config["num_hidden_layers"])


def _shape(info: TensorInfo, name: str) -> tuple[int, ...]:
    """Returns the shape that a Hugging Face checkpoint has: a gate is a matrix, and a mixer's norm has no groups."""
    if name.endswith("_gate.weight") and len(info.shape) == 1:
        return (1, *info.shape)
    return (info.num_elements,) if info.name.endswith(".ssm_norm.weight") else info.shape


def is_offset(name: str) -> bool:
    """Returns whether families that keep norms minus 1 do so with this weight: a norm's, but that of a gated delta
    rule."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _log_decay(path: Path, stored: Stored) -> Stored:
    """Returns A_log, of which the file has -exp(A_log)."""
    rates = -to_float32(stored)
    if not (rates > 0).all():
        raise StartupError(f"model {path}: the tensor of {stored.name} must be negative; download the model again")
    return Stored(stored.name, stored.shape, "F32", np.log(rates).view(np.uint8))


def _of_metadata(file: GgufFile, num_layers: int) -> Iterator[Stored]:
    """Yields the numbers of xIELU, which the metadata have: one for each layer, or one for all. Raises StartupError."""
    for key, name in XIELU.items():
        if key not in file.metadata:
            continue
        numbers = np.asarray(file.metadata[key])
        if numbers.shape not in ((), (num_layers,)) or numbers.dtype.kind != "f":
            raise StartupError(f"model {file.path}: {key} must have a number for each of {num_layers} layers")
        for layer, number in enumerate(np.broadcast_to(numbers.astype(np.float32), num_layers)):
            yield Stored(f"model.layers.{layer}.mlp.act_fn.{name}", (1,), "F32", np.array([number]).view(np.uint8))


def _guesses_ahead(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a tensor belongs to the layers after the last, which guess tokens ahead (nextn, MTP)."""
    layer = layer_of(name) if config.get("num_nextn_predict_layers") else None
    return layer is not None and layer >= config["num_hidden_layers"]


def _experts(path: Path, stored: Stored) -> Iterator[Stored]:
    """Splits a tensor into its matrices, one for each expert or head."""
    count, *shape = stored.shape
    if not shape:
        raise StartupError(
            f"model {path}: the tensor of {stored.name} has one dimension, but experts or heads need at least two"
        )
    parts = stored.data.reshape(count, -1)
    for number, part in enumerate(parts):
        yield stored._replace(name=stored.name.replace("*", str(number)), shape=tuple(shape), content=part)


def readable(stored: Stored) -> Stored:
    """Returns the weight in an encoding that has a kernel. Raises StartupError if a package is missing."""
    if stored.encoding not in WIDENED:
        return stored
    require_tables(stored.encoding)
    num_bytes, wide = BY_NAME[stored.encoding].num_bytes, WIDENED[stored.encoding][0]
    return stored._replace(encoding=wide, content=lambda: widen(stored.encoding, stored.data, num_bytes))


def row_order(path: Path, info: TensorInfo, heads: int | None) -> NDArray[np.int64] | None:
    """Returns the order of rows; None: as stored. llama.cpp interleaves the two halves of each head's rows of q and k;
    ours are one after the other."""
    if heads is None:
        return None
    rows = info.shape[0]
    if rows % (2 * heads):
        raise StartupError(f"model {path}: tensor {echo(info.name)} has {rows} rows, which {heads} heads cannot share")
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
