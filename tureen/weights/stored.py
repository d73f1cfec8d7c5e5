"""Yields a model's weights one by one as they are stored, under Hugging Face names, whatever file they are in. No
torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.registry import find_quantisation
from tureen.weights.gguf import ENCODINGS, GgufFile
from tureen.weights.gguf_config import ROPE_FACTORS
from tureen.weights.gguf_quants import dequantize
from tureen.weights.mapped import TensorInfo
from tureen.weights.modules import Module, modules
from tureen.weights.safetensors import SafetensorsFile, weight_files
from tureen.weights.source import ModelSource

TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES: Final = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
RENAMES: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of checkpoint names -> what they are called here; for language models inside larger ones."""
VISION: Final = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.", "mm_projector.", "image_newline")
)
"""Prefixes of the weights of the part that sees, which a text model has no use for."""
BY_NAME: Final = {encoding.name: encoding for encoding in ENCODINGS.values()}


class Stored(NamedTuple):
    """One weight: its values are those of `data` with `offset` added to each."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    encoding: str  # F32, F16, BF16, or a block format of GGUF: Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
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
        return _of_gguf(source.gguf, config.get("text_config", config))
    settings = _quantisation(config) or _quantisation(config.get("text_config") or {})
    convert = find_quantisation(settings.get("quant_method")).reader(settings) if settings else None
    return _of_folder(source.path, convert)


def iter_vision(source: ModelSource) -> Iterator[Stored]:
    """Yields every weight of the vision encoder, by the file's own names; otherwise as `iter_stored`."""
    return iter_plain(source, lambda name: name.startswith(VISION))


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
    return stored.data.reshape(stored.shape[0], -1)[stored.row_order].reshape(-1)


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(settings, dict):
        raise StartupError(f"config.json: quantization_config: must be an object, got {echo(settings)}")
    return settings


def _of_folder(folder: Path, convert: Callable[[Module], Stored | None] | None) -> Iterator[Stored]:
    """Yields a folder's weights. `convert` makes a module's weight of the tensors that it takes; the others are
    plain."""
    for module in modules(folder):
        if f"{module.name}.".startswith(VISION):
            continue
        weight = convert(module) if convert else None
        if weight is not None:
            yield weight._replace(name=local_name(weight.name))
        for file, info in module.parts.values():
            if info.name.startswith(VISION) or info.name.endswith("rotary_emb.inv_freq"):
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
    is_gemma = config["model_type"].startswith("gemma")
    heads = {}
    if config["model_type"] in ("llama", "mistral"):
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for info in file.tensors.values():
        if info.name == ROPE_FACTORS:  # part of the config
            continue
        name = _hf_name(info.name, GEMMA_LAYER_NAMES if is_gemma else LAYER_NAMES)
        if name is None:
            raise StartupError(f"model {file.path}: tensor {echo(info.name)} is not part of a known architecture")
        offset = -1.0 if is_gemma and name.endswith("norm.weight") else 0.0  # the file holds Hugging Face's weight + 1
        order = _row_order(file.path, info, heads.get(info.name.split(".")[-2]))
        yield Stored(name, info.shape, info.encoding.name, file.raw(info), order, offset)
        file.release(info)


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return None
    return f"model.layers.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"


def _row_order(path: Path, info: TensorInfo, heads: int | None) -> NDArray[np.int64] | None:
    """Returns the order of rows. llama.cpp interleaves the two halves of each head's rows of q and k; ours are one
    after the other."""
    if heads is None:
        return None
    rows = info.shape[0]
    if rows % (2 * heads):
        raise StartupError(f"model {path}: tensor {echo(info.name)} has {rows} rows, which {heads} heads cannot share")
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
