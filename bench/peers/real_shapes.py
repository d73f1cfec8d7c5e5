"""Models with random weights in the shapes of published ones, as GGUF files in Q4_K_M's mix of types:

    PYTHONPATH=tests python bench/peers/real_shapes.py qwen3-0.6b FILE.gguf

No download is needed, and tureen and llama.cpp read the same file. `list` prints the names. Shapes are those of the
models' config.json; a name that ends in `-cut` has fewer layers. Weights are written as random blocks, so that no file
is in memory as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import converted_gguf
import converted_mamba
import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from shapes_of_models import SHAPES
from tiny_gguf import byte_vocabulary
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = 256  # weights in a block of a K type
ROWS = 4096  # random blocks that are repeated


def model_in_shape(name: str) -> Any:
    """Returns a transformers model whose weights are zeros that take no memory."""
    fields = dict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    zeros = {key: torch.zeros(()).expand(weight.shape) for key, weight in model.state_dict().items()}
    model.state_dict = lambda: zeros
    return model


def write(name: str, path: Path) -> None:
    model = model_in_shape(name)
    converter = converted_mamba if converted_mamba.has_mamba(model.config) else converted_gguf
    metadata = converter.metadata(model) | vocabulary(model.config.vocab_size)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            adders[type(value)](key, value)
    random = np.random.default_rng(1)
    stored = {key: kind_of(key, shape, model.config) for key, shape in shapes(converter, model)}
    rotations = converted_gguf.rope_tensors(model.config)
    for key, (shape, kind) in stored.items():
        length = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(key, length, np.dtype(np.uint8), int(np.prod(length)), kind)
    for key, array in rotations.items():
        writer.add_tensor_info(key, array.shape, array.dtype, array.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, (shape, kind) in stored.items():
        writer.write_tensor_data(values(random, key, shape, kind))
    for array in rotations.values():
        writer.write_tensor_data(array)
    writer.close()


def shapes(converter: Any, model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for _, key, array in converter.tensors(model):
        yield key, array.shape


def kind_of(key: str, shape: tuple[int, ...], config: Any) -> tuple[tuple[int, ...], Type]:
    """Returns the type that llama-quantize gives a tensor, near enough: more bits for heads, values and down."""
    if len(shape) == 1 or any(part in key for part in ("ffn_gate_inp", "conv", "norm", "ssm_a", "ssm_d", "altup")):
        return shape, Type.F32
    if shape[-1] % BLOCK:
        return shape, Type.Q8_0 if shape[-1] % 32 == 0 else Type.F32
    if config.model_type == "gpt_oss" and "_exps" in key:
        return shape, Type.MXFP4
    is_head = key == "output.weight" or (key == "token_embd.weight" and config.tie_word_embeddings)
    layer = int(key.split(".")[1]) if key.startswith("blk.") else 0
    is_fine = ("attn_v" in key or "ffn_down" in key) and layer % 2 == 0
    return shape, Type.Q6_K if is_head or is_fine else Type.Q4_K


def values(random: np.random.Generator, key: str, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Returns the bytes of a tensor: random weights with a deviation of 0.6 / sqrt(columns), norms of ones."""
    if kind == Type.F32:
        if key.endswith("ssm_a"):
            array = -np.exp(random.uniform(0, 2, shape))
        elif "norm" in key or key.endswith("scale.weight"):
            array = np.ones(shape)
        else:
            array = random.normal(0, 0.6 / np.sqrt(shape[-1]), shape)
        return array.astype(np.float32)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    scale = 0.6 / np.sqrt(shape[-1])
    pool = BLOCKS[kind](random, scale)
    number = int(np.prod(shape)) // block
    chosen = random.integers(0, len(pool), number, dtype=np.uint16)
    return pool[chosen].reshape(*shape[:-1], shape[-1] // block * size)


def _half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _bytes(random: np.random.Generator, width: int) -> np.ndarray:
    return random.integers(0, 256, (ROWS, width), dtype=np.uint8)


def _constant(*parts: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.concatenate(parts), (ROWS, sum(map(len, parts))))


def _q4_k(random: np.random.Generator, scale: float) -> np.ndarray:
    """Scales and minimums of 32 in 6 bits; a nibble q is (q - 7.5) times the scale."""
    step = scale / 4.6 / 32
    sixes = np.array([160] * 8 + [0] * 4, np.uint8)
    return np.concatenate([_constant(_half(step), _half(7.5 * step), sixes), _bytes(random, 128)], axis=1)


def _q6_k(random: np.random.Generator, scale: float) -> np.ndarray:
    sixteen = np.full(16, 32, np.uint8)
    return np.concatenate([_bytes(random, 192), _constant(sixteen, _half(scale / 18.5 / 32))], axis=1)


def _q8_0(random: np.random.Generator, scale: float) -> np.ndarray:
    return np.concatenate([_constant(_half(scale / 74)), _bytes(random, 32)], axis=1)


def _mxfp4(random: np.random.Generator, scale: float) -> np.ndarray:
    exponent = np.array([round(127 + np.log2(scale / 3.0))], np.uint8)
    return np.concatenate([_constant(exponent), _bytes(random, 16)], axis=1)


BLOCKS = {Type.Q4_K: _q4_k, Type.Q6_K: _q6_k, Type.Q8_0: _q8_0, Type.MXFP4: _mxfp4}


def vocabulary(size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer with `size` tokens: bytes, and pairs of earlier tokens with a byte."""
    start = byte_vocabulary()
    tokens = start["tokenizer.ggml.tokens"][:255]
    merges, known, first = [], set(tokens), 0
    letters = tokens[33:127]
    while len(tokens) < size:
        for letter in letters[: size - len(tokens)]:
            if (pair := tokens[first] + letter) not in known:
                known.add(pair)
                tokens.append(pair)
                merges.append(f"{tokens[first]} {letter}")
        first += 1
    return start | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": merges,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["list"]:
        print("\n".join(SHAPES))
    elif len(sys.argv) == 3 and sys.argv[1] in SHAPES:
        write(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
