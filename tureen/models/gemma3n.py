"""Gemma 3n, text: several residual streams, keys that later layers share, a second embedding, sparse gates."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.layer_inputs import LayerInputs, ResidualStreams
from tureen.layers.layer_keys import LayerKeys
from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import fault, integer, number, optional_number, refuse
from tureen.models.ropes import ropes_of_windows, without_ropes
from tureen.models.shared_keys import apart, shared_layers

__all__ = ["apart"]

ARCHITECTURES = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
FAMILIES = {
    "Gemma 3n": Published("google/gemma-3n-E2B-it", "5B (E2B), 8B (E4B)"),
}
DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
"""Values of keys that published configs leave out."""
MOST_STREAMS = 16
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
FULL_EVERY = 5  # layers, unless the config says otherwise
SPARSE_LAYERS, SPARSITY = 10, 0.95  # the first, unless the config says otherwise


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    refuse(hf, use_bidirectional_attention=False, altup_active_idx=0, altup_correct_scale=True)
    sizes = hf["intermediate_size"]
    widest = max((size for size in sizes if type(size) is int), default=0) if isinstance(sizes, list) else sizes
    config = common(without_ropes({**hf, "intermediate_size": widest}))
    slides = [(layer + 1) % FULL_EVERY != 0 for layer in range(config.num_layers)]
    windows = sliding_windows(hf, config.num_layers, slides)
    keys = [LayerKeys(config.num_kv_heads, config.head_dim, of_layer=shared) for shared in shared_layers(hf, windows)]
    count = integer(hf, "altup_num_inputs")
    if not 2 <= count <= MOST_STREAMS:
        raise fault("altup_num_inputs", f"must be 2 to {MOST_STREAMS}, got {count}")
    bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        value_norm=True,
        norms="both",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=1.0,
        logit_softcap=optional_number(hf, "final_logit_softcapping"),
        windows=windows,
        ropes=ropes_of_windows(
            hf,
            windows,
            local_theta=number(hf, "rope_local_base_freq", LOCAL_THETA),
            full_theta=number(hf, "rope_theta", GLOBAL_THETA),
        ),
        keys=tuple(keys),
        mlp_sizes=_sizes(sizes, config.num_layers),
        mlp_cutoffs=_cutoffs(hf, config.num_layers),
        layer_inputs=LayerInputs(integer(hf, "vocab_size_per_layer_input"), integer(hf, "hidden_size_per_layer_input")),
        streams=ResidualStreams(count, integer(hf, "laurel_rank")),
    )


def _sizes(sizes: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the intermediate size of each layer."""
    if not isinstance(sizes, list):
        return ()
    if len(sizes) != num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise fault("intermediate_size", f"must have a size for each of {num_layers} layers, got {echo(sizes)}")
    return tuple(sizes)


def _cutoffs(hf: Mapping[str, Any], num_layers: int) -> tuple[float | None, ...]:
    """Returns each layer's cutoff of gates, with which the layer's share of normally distributed gates is cut."""
    return tuple(NormalDist().inv_cdf(share) if share else None for share in _sparsity(hf, num_layers))


def _sparsity(hf: Mapping[str, Any], num_layers: int) -> list[float]:
    """Returns the share of gates that are cut to 0, per layer."""
    key = "activation_sparsity_pattern"
    shares = hf.get(key)
    if shares is None:
        sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        return [SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    is_list = isinstance(shares, list) and len(shares) == num_layers
    if not is_list or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares):
        raise fault(key, f"must have a number from 0 to below 1 for each of {num_layers} layers, got {echo(shares)}")
    return [float(share) for share in shares]
