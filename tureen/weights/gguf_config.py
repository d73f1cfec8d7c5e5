"""Makes a configuration in Hugging Face's form from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections import ChainMap
from typing import Any, Final

from tureen.contract.types import Pooling
from tureen.errors import StartupError, echo
from tureen.registry import other_way
from tureen.text.gguf_vocab import end_token_ids, special_id
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_encoders import ARCHITECTURES as ENCODERS
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.gguf_families import ARCHITECTURES, Architecture
from tureen.weights.gguf_rope import rope_scaling
from tureen.weights.mapped import unusable

TOKENS: Final = "tokenizer.ggml.tokens"
PROJECTOR: Final = "clip"
"""The architecture of mmproj files."""
NO_POOLING, CLS, RANK = 0, 2, 4
POOLINGS: Final[dict[object, Pooling]] = {1: "mean", 3: "last"}
OTHER_POOLINGS: Final = {CLS: "cls", RANK: "rank"}
"""Values of pooling_type, by llama.cpp's names (include/llama.h, llama_pooling_type)."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Reads from a GGUF file what config.json of the original model says. Raises StartupError naming what is missing or
    not supported."""
    facts = GgufFacts(file)
    if file.metadata.get("general.type") == "adapter":
        raise facts.fault("this is an adapter: give the model, and the adapter as safetensors by --lora-paths")
    if facts.architecture in ENCODERS:
        config = ENCODERS[facts.architecture](facts)
        facts.get("attention.causal")
        facts.refuse_others()
        return config
    architecture = ARCHITECTURES.get(facts.architecture)
    if architecture is None:
        raise _unsupported(facts)
    if file.unreadable:
        raise unusable(file.path, file.unreadable, "take the model's Q4_K_M file")
    if not architecture.has_experts:
        facts.refuse("expert_count", "a mixture of experts")
    if facts.get("attention.causal") is False and not architecture.sees_ahead:
        raise facts.fault(f"attention in both directions ({facts.architecture}.attention.causal) is not supported")
    gguf_pooling(file)
    config = _common(facts, architecture) | {"architectures": [architecture.classes[0]]}
    config |= architecture.read(facts, config)
    facts.refuse_others()
    return config


def _unsupported(facts: GgufFacts) -> StartupError:
    """Returns the error for an architecture that is not read, with what to do."""
    if facts.architecture == PROJECTOR:
        return facts.fault(
            "this is an mmproj file, the vision encoder of a model: give the GGUF file of its language model, and this "
            "one by --mmproj"
        )
    from tureen.weights.gguf_others import CLASSES  # noqa: PLC0415 - for refusals

    other = CLASSES.get(facts.architecture)
    way = f"; {other_way(other)}" if other else ""
    return facts.fault(
        f"architecture {echo(facts.architecture)} is not supported in GGUF files{way}; "
        f"these are: {', '.join((*ARCHITECTURES, *ENCODERS))}"
    )


def gguf_pooling(file: GgufFile) -> Pooling | None:
    """Returns how the model of a GGUF file makes an embedding; None if the file does not say. Raises StartupError."""
    facts = GgufFacts(file)
    kind = facts.get("pooling_type")
    is_encoder = facts.architecture in ENCODERS
    if kind in (None, NO_POOLING) or (is_encoder and kind == RANK):
        return None
    if is_encoder and kind == CLS:
        return "cls"
    if kind not in POOLINGS:
        name = OTHER_POOLINGS.get(kind, "unknown") if isinstance(kind, int) else "unknown"
        raise facts.fault(
            f"{facts.architecture}.pooling_type {echo(kind)} ({name}) is not supported; these are: "
            f"{NO_POOLING} (none), " + ", ".join(f"{number} ({known})" for number, known in POOLINGS.items())
        )
    return POOLINGS[kind]


def _common(facts: GgufFacts, architecture: Architecture) -> dict[str, Any]:
    heads = facts.count("attention.head_count")
    hidden = facts.count("embedding_length")
    if architecture.is_latent:  # `read` reads the other sizes
        head_dim = facts.count("rope.dimension_count")
    elif architecture.layers_differ:
        head_dim = facts.count("attention.key_length_swa", facts.count("attention.key_length"))
    else:
        head_dim = facts.count("attention.key_length", hidden // heads)
        if facts.count("attention.value_length", head_dim) != head_dim:
            raise facts.unsupported("keys and values of different length are not supported")
    if architecture.layers_differ:
        rotated, scaling = head_dim, None
    else:
        rotated = _rotated(facts, head_dim, may_be_fewer=architecture.rotates_part)
        scaling = rope_scaling(facts, rotated)
    scale = head_dim**-0.5
    stored_scale = facts.factor("attention.scale", scale)
    if not architecture.has_scale and not math.isclose(stored_scale, scale, rel_tol=1e-5):
        raise facts.unsupported(f"{facts.architecture}.attention.scale must be {scale:g}, got {stored_scale:g}")
    embedding = facts.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise facts.fault("tensor 'token_embd.weight' is missing")
    tokens = facts.file.metadata.get(TOKENS)
    vocabulary: ChainMap[str, Any] = ChainMap({TOKENS: tokens}, facts.file.metadata)  # type: ignore[arg-type] # only read
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    return {
        "hidden_size": hidden,
        **_layers(facts),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(facts, architecture, heads),
        "head_dim": head_dim,
        "intermediate_size": _intermediate_size(facts, architecture),
        "rms_norm_eps": facts.number(architecture.epsilon),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not facts.has("output.weight"),
        "attention_bias": facts.has_any(".attn_q.bias", ".attn_qkv.bias"),
        "mlp_bias": facts.has_any(".ffn_up.bias"),
        "hidden_act": "silu",
        "bos_token_id": special_id(vocabulary, "bos_token_id", num_tokens) if num_tokens else None,
        "eos_token_id": list(end_token_ids(vocabulary)) if num_tokens else [],
    }


def _key_heads(facts: GgufFacts, architecture: Architecture, heads: int) -> int:
    """Returns the number of key heads: the first layer's if layers differ."""
    key = "attention.head_count_kv"
    if architecture.has_mixers:
        return facts.one_count(key, heads)
    return facts.counts(key, facts.count("block_count"))[0] if architecture.layers_differ else facts.count(key, heads)


def _intermediate_size(facts: GgufFacts, architecture: Architecture) -> int:
    """Returns the inner size of an mlp; files of models whose mlps all are experts may have that of an expert alone."""
    if architecture.layers_differ and architecture.has_mixers:  # layers with a mixer have no mlp
        return facts.one_count("feed_forward_length")
    if architecture.layers_differ:
        return facts.counts("feed_forward_length", facts.count("block_count"))[0]
    size = facts.optional_count("feed_forward_length")
    if size is None and architecture.has_experts:
        size = facts.optional_count("expert_feed_forward_length")
    return facts.count("feed_forward_length", size)


def _rotated(facts: GgufFacts, head_dim: int, *, may_be_fewer: bool) -> int:
    """Returns the number of a head's dimensions that are rotated, the first ones. Raises StartupError."""
    rotated = facts.count("rope.dimension_count", head_dim)
    may_be_fewer = may_be_fewer and int(head_dim * (rotated / head_dim)) == rotated
    if rotated % 2 or rotated > head_dim or (rotated < head_dim and not may_be_fewer):
        raise facts.unsupported(f"{facts.architecture}.rope.dimension_count {rotated} of {head_dim} is not supported")
    return rotated


def _layers(facts: GgufFacts) -> dict[str, Any]:
    """Returns the number of layers, without those after the last that guess tokens ahead and are not used."""
    count, ahead = facts.count("block_count"), facts.get("nextn_predict_layers") or 0
    if not isinstance(ahead, int) or isinstance(ahead, bool) or not 0 <= ahead < count:
        raise facts.fault(f"{facts.architecture}.nextn_predict_layers must be less than {count}, got {echo(ahead)}")
    return {"num_hidden_layers": count - ahead, "num_nextn_predict_layers": ahead}
