"""Gemma 4: heads of two sizes, keys that later layers share, a second embedding, experts beside an mlp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.layer_inputs import LayerInputs
from tureen.layers.layer_keys import LayerKeys
from tureen.layers.routing import Experts
from tureen.media import gemma4_vision
from tureen.media.gemma4_vision import Gemma4Vision
from tureen.models.config import ModelConfig, WholePictures, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import fault, integer, layer_number, optional_number, refuse
from tureen.models.ropes import ropes_of_windows, without_ropes
from tureen.models.shared_keys import apart, shared_layers

__all__ = ["apart"]

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
FAMILIES = {
    "Gemma 4": Published(
        "google/gemma-4-E2B-it", "5B (E2B), 8B (E4B), 26B-A4B, 31B", calls="gemma4", thoughts="gemma4"
    ),
}
RENAMES = ((".router.proj.", ".mlp.gate."), (".router.", ".mlp.gate."), (".experts.", ".mlp.experts."))
"""Parts of a checkpoint's names -> our names."""
DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
"""Published configs leave out what equals these."""
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""The ropes of a config that names none."""
WHOLE = WholePictures("windows", max(gemma4_vision.MOST_TOKENS))
FULL_EVERY = 6  # layers, unless the config says otherwise


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    refuse(hf, use_bidirectional_attention="vision")
    config = common(without_ropes(hf))
    slides = [(layer + 1) % FULL_EVERY != 0 for layer in range(config.num_layers - 1)]
    windows = sliding_windows(hf, config.num_layers, [*slides, False])
    windows = (*windows[:-1], None)  # transformers forces it, too
    keys = _keys(hf, config, windows)
    wide = 2 * config.intermediate_size if hf.get("use_double_wide_mlp") else config.intermediate_size
    bias = bool(hf.get("attention_bias", False))
    size, vocab_size = layer_number(hf, "hidden_size_per_layer_input", 0), integer(hf, "vocab_size_per_layer_input")
    if size and vocab_size < config.vocab_size:
        raise fault("vocab_size_per_layer_input", f"{vocab_size} is less than vocab_size, {config.vocab_size}")
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
            {**hf, "rope_parameters": hf.get("rope_parameters") or ROPES}, windows, local_theta=1e4, full_theta=1e6
        ),
        keys=tuple(keys),
        mlp_sizes=tuple(config.intermediate_size if own.of_layer is None else wide for own in keys),
        layer_inputs=LayerInputs(vocab_size, size) if size else None,
        has_layer_scales=True,
        experts=(_experts(hf),) * config.num_layers if hf.get("enable_moe_block") else (),
        whole_pictures=WHOLE if hf.get("use_bidirectional_attention") else None,
    )


def parse_vision(hf: Mapping[str, Any]) -> Gemma4Vision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return gemma4_vision.parse_vision(hf)


def _keys(hf: Mapping[str, Any], config: ModelConfig, windows: tuple[int | None, ...]) -> list[LayerKeys]:
    """Returns the keys of each layer. Raises StartupError naming the key at fault."""
    are_values = bool(hf.get("attention_k_eq_v", False))
    keys: list[LayerKeys] = []
    for layer, shared in enumerate(shared_layers(hf, windows)):
        is_full = windows[layer] is None
        sizes = _sizes(hf, config, layer, is_full=is_full)
        keys.append(replace(sizes, are_values=are_values and is_full, of_layer=shared))
        if shared is not None and replace(keys[shared], are_values=False) != sizes:
            raise fault(
                "num_kv_shared_layers", f"layer {layer} has other heads than layer {shared}, whose keys it uses"
            )
    return keys


def _sizes(hf: Mapping[str, Any], config: ModelConfig, layer: int, *, is_full: bool) -> LayerKeys:
    """Returns the number and size of a layer's keys. transformers stores them per layer, Google per kind of layer."""
    own: Mapping[str, Any] = {}
    if hf.get("per_layer_config") is not None:
        each = _mapping("per_layer_config", hf["per_layer_config"])
        others = each.keys() - set(map(str, range(config.num_layers)))
        if others:
            raise fault("per_layer_config", f"{echo(min(others, key=str))} is not one of {config.num_layers} layers")
        own = _mapping("per_layer_config", each.get(str(layer)) or {})
    elif is_full:
        has_heads = hf.get("attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None
        own = {"head_dim": hf["global_head_dim"]}
        own |= {"num_key_value_heads": hf["num_global_key_value_heads"]} if has_heads else {}
    unknown = own.keys() - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise fault("per_layer_config", f"{echo(min(unknown))} of layer {layer} is not supported")
    heads, size = integer(own, "num_key_value_heads", config.num_kv_heads), integer(own, "head_dim", config.head_dim)
    if config.num_heads % heads or size % 2:
        raise fault("head_dim", f"layer {layer}: {heads} key heads of size {size} do not fit {config.num_heads} heads")
    return LayerKeys(heads, size)


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise fault(key, f"must be an object, got {echo(value)}")
    return value


def _experts(hf: Mapping[str, Any]) -> Experts:
    count, chosen = integer(hf, "num_experts"), integer(hf, "top_k_experts")
    if chosen > count:
        raise fault("top_k_experts", f"{chosen} of {count} experts cannot be used")
    return Experts(
        count=count,
        num_chosen=chosen,
        size=integer(hf, "moe_intermediate_size"),
        is_normalised=True,
        are_beside=True,
    )
