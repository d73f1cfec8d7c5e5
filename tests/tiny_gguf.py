"""GGUF files for tests, written by the `gguf` package: from plain data, or from a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tureen.text.tokenizer import BYTE_OF_CHAR

NORMAL, CONTROL = 1, 3
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
POST_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
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


def write_from_transformers(path: Path, model: Any, more: Mapping[str, Any] | None = None) -> Path:
    """What a conversion of this transformers model yields: names, row order of q and k, offset of norms. `more`:
    metadata besides the model's own."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        **_rope_facts(config, architecture),
    }
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in facts.items()}
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.detach().float().numpy()
        tensors[_gguf_name(name, architecture)] = _as_converted(name, array, architecture, config)
    return write_gguf(path, metadata | byte_vocabulary(config.vocab_size) | dict(more or {}), tensors)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_facts(config: Any, architecture: str) -> dict[str, Any]:
    if architecture != "gemma3":
        window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
        facts = {"attention.sliding_window": window} if window else {}
        return facts | {"rope.freq_base": float(config.rope_parameters["rope_theta"])}
    return {
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "attention.sliding_window": config.sliding_window,
    }


def _gguf_name(name: str, architecture: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    names = LAYER_NAMES | (GEMMA_NORMS if architecture == "gemma3" else POST_NORMS)
    return f"blk.{layer}.{names[rest]}.{kind}"


def _as_converted(name: str, array: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return array + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture == "llama" and heads:
        return np.ascontiguousarray(array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape))
    return array
