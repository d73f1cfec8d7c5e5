"""Makes a configuration in Hugging Face's form from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tureen.contract.types import DecoderPooling
from tureen.errors import StartupError, echo
from tureen.text.gguf_vocab import end_token_ids, special_id
from tureen.weights.gguf import GgufFile

ROPE_FACTORS: Final = "rope_freqs.weight"
TOKENS: Final = "tokenizer.ggml.tokens"
ROPE_TOLERANCE: Final = 1e-3
NO_POOLING: Final = 0
POOLINGS: Final[dict[object, DecoderPooling]] = {1: "mean", 3: "last"}
OTHER_POOLINGS: Final = {2: "cls", 4: "rank"}
"""Values of pooling_type, by llama.cpp's names (include/llama.h, llama_pooling_type)."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Reads from a GGUF file what config.json of the original model says. Raises StartupError naming what is missing or
    not supported."""
    facts = _Facts(file)
    build = ARCHITECTURES.get(facts.architecture)
    if build is None:
        raise facts.fault(
            f"architecture {echo(facts.architecture)} is not supported; these are: {', '.join(ARCHITECTURES)}"
        )
    facts.refuse("expert_count", "a mixture of experts")
    if facts.get("attention.causal") is False:
        raise facts.fault(f"attention in both directions ({facts.architecture}.attention.causal) is not supported")
    gguf_pooling(file)
    config = _common(facts)
    config.update(build(facts, config))
    return config


def gguf_pooling(file: GgufFile) -> DecoderPooling | None:
    """Returns how the model of a GGUF file makes an embedding; None if the file does not say. Raises StartupError."""
    facts = _Facts(file)
    kind = facts.get("pooling_type")
    if kind in (None, NO_POOLING):
        return None
    if kind not in POOLINGS:
        name = OTHER_POOLINGS.get(kind, "unknown") if isinstance(kind, int) else "unknown"
        raise facts.fault(
            f"{facts.architecture}.pooling_type {echo(kind)} ({name}) is not supported; these are: "
            f"{NO_POOLING} (none), " + ", ".join(f"{number} ({known})" for number, known in POOLINGS.items())
        )
    return POOLINGS[kind]


class _Facts:
    """The metadata under the architecture's own prefix, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.fault("general.architecture is missing in its metadata")
        self.architecture = architecture

    def get(self, key: str) -> object:
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray):  # one number a layer
            if value.size == 0 or (value != value[0]).any():
                raise self.fault(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
            return value[0].item()
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise self.fault(f"{self.architecture}.{key} must be a positive integer, got {echo(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fault(f"{self.architecture}.{key} must be a positive number, got {echo(value)}")
        return float(value)

    def refuse(self, key: str, what: str) -> None:
        if self.get(key):
            raise self.fault(f"{what} ({self.architecture}.{key}) is not supported")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def fault(self, message: str) -> StartupError:
        return StartupError(f"model {self.file.path}: {message}")


def _common(facts: _Facts) -> dict[str, Any]:
    heads = facts.count("attention.head_count")
    hidden = facts.count("embedding_length")
    head_dim = facts.count("attention.key_length", hidden // heads)
    if facts.count("attention.value_length", head_dim) != head_dim:
        raise facts.fault("keys and values of different length are not supported")
    if facts.count("rope.dimension_count", head_dim) != head_dim:
        raise facts.fault("rotary embedding of a part of each head is not supported")
    embedding = facts.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise facts.fault("tensor 'token_embd.weight' is missing")
    tokens = facts.file.metadata.get(TOKENS)
    vocabulary: ChainMap[str, Any] = ChainMap({TOKENS: tokens}, facts.file.metadata)  # type: ignore[arg-type] # only read
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    return {
        "hidden_size": hidden,
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": facts.count("feed_forward_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts, head_dim),
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not facts.has("output.weight"),
        "attention_bias": facts.has("blk.0.attn_q.bias"),
        "mlp_bias": facts.has("blk.0.ffn_up.bias"),
        "hidden_act": "silu",
        "bos_token_id": special_id(vocabulary, "bos_token_id", num_tokens) if num_tokens else None,
        "eos_token_id": list(end_token_ids(vocabulary)) if num_tokens else [],
    }


def _llama(facts: _Facts, config: dict[str, Any]) -> dict[str, Any]:
    if facts.get("attention.sliding_window"):
        window = facts.count("attention.sliding_window")
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _qwen2(facts: _Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(facts: _Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _gemma3(facts: _Facts, config: dict[str, Any]) -> dict[str, Any]:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        facts.refuse(key, "capping of logits")
    layers = config["num_hidden_layers"]
    pattern = facts.count("attention.sliding_window_pattern", 6)
    is_27b = layers == 62  # the one size whose queries are scaled by hidden size over heads instead of the head size
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "sliding_window": facts.count("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
    }


ARCHITECTURES: Final[dict[str, Callable[[_Facts, dict[str, Any]], dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _rope_scaling(facts: _Facts, head_dim: int) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise facts.fault(f"rotary scaling {echo(kind)} is not supported; linear and llama3 are")
    if facts.has(ROPE_FACTORS):
        return _llama3_scaling(facts, head_dim)
    if kind == "linear":
        return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    return None


def _llama3_scaling(facts: _Facts, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's rope scaling. The file stores a divisor per frequency, which one formula made; its factor
    varies."""
    tensor = facts.file.tensors[ROPE_FACTORS]
    if tensor.encoding.name != "F32" or tensor.shape != (head_dim // 2,):
        raise facts.fault(f"tensor '{ROPE_FACTORS}' must be {head_dim // 2} float32 numbers")
    stored = facts.file.raw(tensor).view("<f4").astype(np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(facts.number("rope.freq_base", 10000.0), head_dim, scaling)
    if not np.allclose(stored, expected, rtol=ROPE_TOLERANCE):
        raise facts.fault(f"tensor '{ROPE_FACTORS}' is a rotary scaling other than Llama 3's, which is not supported")
    return scaling


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the divisors of the head_dim/2 rotary frequencies (Llama 3.1): 1 for short waves, `factor` for long
    ones."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))
