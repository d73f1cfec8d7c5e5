"""Kimi Linear (arXiv:2510.26692): a delta rule in three layers of four, latent attention without positions in the
others, and experts of which some are shared by all tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.mixers import KimiDelta
from tureen.models import latents
from tureen.models.config import EXPERT_NAMES, ModelConfig
from tureen.models.mamba import kernel
from tureen.models.published import Published
from tureen.models.reading import fault, integer, layer_kinds, layer_number, refuse
from tureen.weights.stored import Stored

ARCHITECTURES = ("KimiLinearForCausalLM",)
FAMILIES = {"Kimi Linear": Published("moonshotai/Kimi-Linear-48B-A3B-Instruct", "48B-A3B")}
RENAMES = ((".block_sparse_moe.", ".mlp."), (".shared_experts.", ".shared_expert."), *EXPERT_NAMES)
"""Parts of a checkpoint's names -> our names."""
DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
}
"""Values of keys that a config leaves out."""
KINDS = ("linear_attention", "full_attention")
CONTEXT = 1 << 20
FULL_EVERY = 4  # layers, unless the config says otherwise


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    refuse(hf, mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1, num_nextn_predict_layers=0)
    own = _of_deepseek(hf)
    config = latents.with_latent(own, is_interleaved=False)
    linear = _linear(hf)
    kinds = _kinds(hf, linear, config.num_layers)
    mixer = KimiDelta(
        num_heads=integer(linear, "num_heads", 32),
        head_dim=integer(linear, "head_dim", 128),
        kernel=kernel(linear, "short_conv_kernel_size", 4),
    )
    experts = latents.experts_v3(own)
    return replace(
        config,
        ropes=(None,) * config.num_layers,
        mixers=tuple(mixer if kind == "linear_attention" else None for kind in kinds),
        experts=tuple(experts if is_sparse else None for is_sparse in _sparse(hf, config.num_layers)),
    )


def _of_deepseek(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with DeepSeek's names for keys that are named otherwise here."""
    return {
        **hf,
        "n_routed_experts": integer(hf, "num_experts"),
        "num_experts_per_tok": integer(hf, "num_experts_per_token"),
        "n_shared_experts": layer_number(hf, "num_shared_experts", 0),
        "n_group": integer(hf, "num_expert_group"),
        "norm_topk_prob": hf["moe_renormalize"],
        "max_position_embeddings": integer(hf, "model_max_length", hf.get("max_position_embeddings") or CONTEXT),
    }


def _linear(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries of linear_attn_config, which transformers writes as keys of their own."""
    own = hf.get("linear_attn_config")
    if own is None:
        names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        return {name: hf[key] for name, key in names.items() if key in hf}
    if not isinstance(own, Mapping):
        raise fault("linear_attn_config", f"must be an object, got {echo(own)}")
    return own


def _kinds(hf: Mapping[str, Any], linear: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns the kind of each layer. Published configs list the layers of each kind, counted from 1."""
    full = linear.get("full_attn_layers")
    if full is None:
        usual = ["full_attention" if layer and layer % FULL_EVERY == 0 else KINDS[0] for layer in range(num_layers)]
        return layer_kinds(hf, num_layers, KINDS, usual)
    others = linear.get("kda_layers")
    layers = [*range(1, num_layers + 1)]
    listed = [*full, *others] if isinstance(full, list) and isinstance(others, list) else []
    if any(type(layer) is not int for layer in listed) or sorted(listed) != layers:
        raise fault("linear_attn_config", f"must list each of {num_layers} layers once, got {echo(linear)}")
    return ["full_attention" if layer in full else "linear_attention" for layer in layers]


def _sparse(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns whether each layer has experts."""
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        first = layer_number(hf, "first_k_dense_replace", 1)
        return [layer >= first for layer in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise fault("mlp_layer_types", f"must say dense or sparse for each of {num_layers} layers, got {echo(kinds)}")
    return [kind == "sparse" for kind in kinds]


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields the weights of latent attention as `latents.apart` does, and those of a delta rule under their names."""
    own = stored.name.removeprefix("model.layers.").replace(".linear_attn.", ".self_attn.")
    layer, _, name = own.partition(".self_attn.")
    mixer = config.mixer_of(int(layer)) if name and layer.isdecimal() and int(layer) < config.num_layers else None
    if not isinstance(mixer, KimiDelta):
        yield from latents.apart(stored, config)
        return
    shape = stored.shape
    if name == "A_log":
        shape = (math.prod(shape),)
    elif name.endswith("_conv1d.weight") and shape[-1] == mixer.kernel:
        shape = (math.prod(shape[:-1]), 1, mixer.kernel)
    yield stored._replace(name=f"model.layers.{layer}.linear_attn.{name}", shape=shape)
