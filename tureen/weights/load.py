"""A model's tensors one by one, under their Hugging Face names and in their layout, whatever file they are in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from tureen.errors import StartupError, echo
from tureen.weights.gguf import GgufFile, TensorInfo
from tureen.weights.gguf_config import ROPE_FACTORS
from tureen.weights.gguf_quants import dequantize
from tureen.weights.safetensors import folder_tensors
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
STORED_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def iter_tensors(source: ModelSource, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) for every weight; `config` is `model_config(source)`.

    A tensor has its stored type, or float32 if it was quantised; each is made when asked for and not kept.
    Raises StartupError naming the file and the fault.
    """
    if source.format == "gguf":
        return _gguf_tensors(source, config)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if config.get("quantization_config"):
        raise StartupError(
            f"model {source.path}: weights quantised with {echo(method)} are not supported; use a GGUF file"
        )
    return folder_tensors(source.path)


def _gguf_tensors(source: ModelSource, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    file = GgufFile(source.path)
    is_gemma = config["model_type"].startswith("gemma")
    try:
        for info in file.tensors.values():
            if info.name == ROPE_FACTORS:  # part of the config
                continue
            name = _hf_name(info.name, GEMMA_LAYER_NAMES if is_gemma else LAYER_NAMES)
            if name is None:
                raise StartupError(f"model {source.path}: tensor {echo(info.name)} is not part of a known architecture")
            tensor = _read(file, info)
            if config["model_type"] in ("llama", "mistral") and ".attn_" in info.name:
                tensor = _unpermute(tensor, info, config)
            if is_gemma and name.endswith("norm.weight"):
                tensor = tensor - 1  # the file holds what multiplies, the original what is added to 1
            yield name, tensor
            file.release(info)
    finally:
        file.close()


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return None
    return f"model.layers.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"


def _read(file: GgufFile, info: TensorInfo) -> torch.Tensor:
    raw = file.raw(info)
    dtype = STORED_DTYPES.get(info.encoding.name)
    if dtype is not None:
        return torch.from_numpy(raw.copy()).view(dtype).reshape(info.shape)
    values = np.empty(info.num_elements, np.float32)
    dequantize(raw, info.encoding, values)
    return torch.from_numpy(values).reshape(info.shape)


def _unpermute(tensor: torch.Tensor, info: TensorInfo, config: Mapping[str, Any]) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each head's rows of q and k; ours are one after the other."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(
        info.name.split(".")[2]
    )
    if heads is None:
        return tensor
    if tensor.shape[0] % (2 * heads):
        raise StartupError(f"tensor {echo(info.name)} has {tensor.shape[0]} rows, which {heads} heads cannot share")
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
