"""Reads Gemma 3n and 4 from the metadata of a GGUF file.

Source: llama.cpp's src/models/gemma3n.cpp and gemma4.cpp, and its converter.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from tureen.errors import echo
from tureen.weights.gguf_experts import Config, experts
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.gguf_rope import ROPE_FACTORS, numbers

SECOND_EMBEDDING: Final = "per_layer_token_embd.weight"
STANDS_STILL: Final = 1e29
"""A frequency divided by this or more does not turn."""


def gemma3n(facts: GgufFacts, config: Config) -> Config:
    layers, low_rank = config["num_hidden_layers"], facts.file.tensors.get("blk.0.laurel_l.weight")
    if low_rank is None or len(low_rank.shape) != 2:
        raise facts.fault("tensor 'blk.0.laurel_l.weight' is missing")
    if facts.get("altup.active_idx"):
        raise facts.unsupported(f"gemma3n.altup.active_idx must be 0, got {echo(facts.get('altup.active_idx'))}")
    size, own = _head_dim(facts, ""), "attention.key_length_swa"
    if facts.count(own, size) != size:
        raise facts.unsupported(f"gemma3n.{own} must be {size}, got {facts.count(own)}")
    return {
        "model_type": "gemma3n_text",
        "head_dim": size,
        **_kinds(facts, layers),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "intermediate_size": facts.counts("feed_forward_length", layers),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": _sparsity(facts, layers),
        "altup_num_inputs": facts.count("altup.num_inputs"),
        "laurel_rank": low_rank.shape[0],
        **_second_embedding(facts),
    }


def _sparsity(facts: GgufFacts, layers: int) -> list[float]:
    """Returns the share of gates that are cut to 0, per layer. Files have the cutoff in deviations from the mean."""
    cutoffs = facts.stored("activation_sparsity_scale")
    if not isinstance(cutoffs, np.ndarray) or cutoffs.dtype.kind != "f" or len(cutoffs) < layers:
        raise facts.fault(f"gemma3n.activation_sparsity_scale must have a number for each of {layers} layers")
    return [0.5 * math.erfc(-float(cutoff) / math.sqrt(2)) for cutoff in cutoffs[:layers]]  # of a normal distribution


def _kinds(facts: GgufFacts, layers: int) -> Config:
    """Returns which layers have a window, and which share their keys. Raises StartupError for another scale than 1."""
    scale = facts.factor("attention.scale", 1.0)
    if scale != 1:
        raise facts.unsupported(f"{facts.architecture}.attention.scale must be 1, got {scale:g}")
    slides = facts.flags("attention.sliding_window_pattern", layers)
    if slides is None:
        raise facts.fault(f"{facts.architecture}.attention.sliding_window_pattern must have a flag for each layer")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "num_kv_shared_layers": facts.optional_count("attention.shared_kv_layers") or 0,
    }


def gemma4(facts: GgufFacts, config: Config) -> Config:
    layers, kinds = config["num_hidden_layers"], _kinds(facts, config["num_hidden_layers"])
    slides = [kind == "sliding_attention" for kind in kinds["layer_types"]]
    num_shared, capping = kinds["num_kv_shared_layers"], "final_logit_softcapping"
    return {
        "model_type": "gemma4_text",
        **kinds,
        "attention_k_eq_v": _are_values(facts, slides, num_shared),
        "per_layer_config": _sizes(facts, slides),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10000.0)},
            "full_attention": _full_rope(facts),
        },
        "rope_theta": None,
        "rope_scaling": None,
        "use_double_wide_mlp": _is_wide(facts, layers, num_shared),
        **_second_embedding(facts),
        **_experts(facts),
        capping: facts.number(capping) if facts.get(capping) else None,
    }


def _sizes(facts: GgufFacts, slides: list[bool]) -> dict[str, dict[str, int]]:
    """Returns the number and size of each layer's keys, in the form of transformers."""
    full, sliding = (_head_dim(facts, suffix) for suffix in ("", "_swa"))
    counts = facts.counts("attention.head_count_kv", len(slides))
    return {
        str(layer): {"head_dim": sliding if is_sliding else full, "num_key_value_heads": count}
        for layer, (is_sliding, count) in enumerate(zip(slides, counts, strict=True))
    }


def _head_dim(facts: GgufFacts, suffix: str) -> int:
    """Returns the head size of one kind of layer. Raises StartupError if values or the rotation have another size."""
    size = facts.count(f"attention.key_length{suffix}")
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if facts.count(key, size) != size:
            raise facts.unsupported(f"{facts.architecture}.{key} must be {size}, got {facts.count(key)}")
    return size


def _full_rope(facts: GgufFacts) -> dict[str, Any]:
    """Returns the rope of layers without a window, whose last pairs do not turn. Raises StartupError for any other."""
    size, theta = facts.count("attention.key_length"), facts.number("rope.freq_base", 1_000_000.0)
    divisors = numbers(facts, ROPE_FACTORS, size // 2)
    turning = int(np.count_nonzero(divisors == 1))
    if turning == 0 or (divisors[:turning] != 1).any() or (divisors[turning:] < STANDS_STILL).any():
        raise facts.unsupported(f"tensor '{ROPE_FACTORS}' is a rotary scaling other than Gemma 4's")
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 2 * turning / size}


def _are_values(facts: GgufFacts, slides: list[bool], num_shared: int) -> bool:
    """Returns whether layers without a window use their keys as values."""
    full = [layer for layer, is_sliding in enumerate(slides[: len(slides) - num_shared]) if not is_sliding]
    kinds = {facts.has(f"blk.{layer}.attn_v.weight") for layer in full}
    if len(kinds) > 1:
        raise facts.unsupported("blk.N.attn_v.weight in some layers without a window, but not in all, is not supported")
    return kinds == {False}


def _is_wide(facts: GgufFacts, layers: int, num_shared: int) -> bool:
    """Returns whether layers with shared keys have mlps twice as large."""
    sizes = facts.counts("feed_forward_length", layers)
    own, shared = set(sizes[: layers - num_shared]), set(sizes[layers - num_shared :])
    if len(own) == 1 and shared <= own:
        return False
    if len(own) != 1 or shared != {2 * min(own)}:
        raise facts.unsupported("gemma4.feed_forward_length differs from layer to layer in a way that is not supported")
    return True


def _second_embedding(facts: GgufFacts) -> Config:
    size = facts.optional_count("embedding_length_per_layer_input") or 0
    if size == 0:
        return {"hidden_size_per_layer_input": 0}
    table = facts.file.tensors.get(SECOND_EMBEDDING)
    if table is None or len(table.shape) != 2:
        raise facts.fault(f"tensor '{SECOND_EMBEDDING}' is missing")
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


def _experts(facts: GgufFacts) -> Config:
    size = facts.optional_count("expert_feed_forward_length")  # older converters write it for every model
    if not facts.get("expert_count"):
        return {}
    count, used = experts(facts)
    return {"enable_moe_block": True, "num_experts": count, "top_k_experts": used, "moe_intermediate_size": size}
