"""GGUF files for tests, written by the `gguf` package: from plain data, or from a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import converted_gguf
import converted_mamba
import gguf
import numpy as np

from tureen.text.tokenizer import BYTE_OF_CHAR

NORMAL, CONTROL = 1, 3
Tensor = np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A tensor is an array, or (stored bytes [rows, bytes per row], type)."""
    metadata = dict(metadata)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, (list, np.ndarray)):
            writer.add_array(key, list(value))
        else:
            {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ](key, value)
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary(size: int = 256) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: ids are bytes, but 255 (in no UTF-8) is " t"; from 256 on control tokens."""
    chars = [*sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)[:255], "Ġt"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*chars, *(f"<control{i}>" for i in range(256, size))][:size],
        "tokenizer.ggml.token_type": [NORMAL] * min(size, 256) + [CONTROL] * max(size - 256, 0),
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def architecture_metadata(architecture: str, **facts: Any) -> dict[str, Any]:
    """The keys a model of this architecture must have; `facts` replace or add some (dots written as __)."""
    defaults = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    defaults |= {"attention.sliding_window": 16} if architecture == "gemma3" else {}
    facts = {key.replace("__", "."): value for key, value in facts.items()}
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in (defaults | facts).items()}


def write_from_transformers(
    path: Path,
    model: Any,
    more: Mapping[str, Any] | None = None,
    stored: Callable[[str, np.ndarray], Tensor] = lambda name, array: array,
) -> Path:
    """What a conversion of this transformers model yields: names, row order of q and k, offset of norms. `more`:
    metadata in addition to the model's own. `stored`: the tensor to write for a parameter of this name and values."""
    tensors: dict[str, Tensor] = {**converted_gguf.rope_tensors(model.config)}
    converter = converted_mamba if converted_mamba.has_mamba(model.config) else converted_gguf
    for name, gguf_name, array in converter.tensors(model):
        tensors[gguf_name] = stored(name, array)
    metadata = converter.metadata(model) | byte_vocabulary(model.config.vocab_size) | dict(more or {})
    return write_gguf(path, metadata, tensors)
