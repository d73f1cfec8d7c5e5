"""What llama.cpp's converter makes of a transformers model with Mamba 2 layers: the metadata, and the tensors by their
GGUF names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

UNLIMITED = 1 << 20
"""The context length of models without positions."""
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MIXER = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mamba.{name}": ours for name, ours in MIXER.items()},
    **{f"mixer.{name}": ours for name, ours in MIXER.items()},
    **{f"{block}.{name}_proj": f"attn_{name}" for block in ("self_attn", "mixer") for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "mixer.o_proj": "attn_output",
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
    **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
    **{f"mixer.experts.{name}_proj": f"ffn_{name}_exps.weight" for name in ("up", "down")},
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
WHOLE = {"pre_ff_layernorm.weight": "ffn_norm"}  # the converter's table leaves out the end
ARCHITECTURES = {"falcon_h1": "falcon-h1", "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h"}


def has_mamba(config: Any) -> bool:
    """Return whether this file converts the model."""
    kinds = getattr(config, "layer_types", None) or ["mamba"]
    return config.model_type in ARCHITECTURES and not set(kinds) <= {"attention", "full_attention"}


def metadata(model: Any) -> dict[str, Any]:
    """Return the metadata of a model, without those of its vocabulary."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type] + ("_moe" if _has_nemotron_experts(config) else "")
    facts = {
        "vocab_size": config.vocab_size,
        "context_length": UNLIMITED,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        **FAMILIES[config.model_type](config),
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in facts.items()}


def _mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _falcon(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return {
        "context_length": config.max_position_embeddings,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **_mamba(config),
    }


def _hybrid(config: Any, kinds: list[str], head_dim: int) -> dict[str, Any]:
    """What Granite and Nemotron share."""
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [heads if kind in ("attention", "full_attention") else 0 for kind in kinds],
        "rope.dimension_count": head_dim,
        "rope.scaling.finetuned": False,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok if config.num_local_experts else 0,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        **_mamba(config),
        **_hybrid(config, config.layer_types, config.hidden_size // config.num_attention_heads),
    }


def _nemotron(config: Any) -> dict[str, Any]:
    kinds, has_experts = config.layers_block_type, _has_nemotron_experts(config)
    kind, size = ("moe", config.moe_intermediate_size) if has_experts else ("mlp", config.intermediate_size)
    return {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        **_hybrid(config, kinds, config.head_dim),
        "feed_forward_length": [size if one == kind else 0 for one in kinds],
        **(_nemotron_experts(config) if has_experts else {}),
    }


def _nemotron_experts(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


FAMILIES = {"falcon_h1": _falcon, "granitemoehybrid": _granite, "nemotron_h": _nemotron}
"""What a family has beside the common facts, or instead of them."""


def _has_nemotron_experts(config: Any) -> bool:
    return config.model_type == "nemotron_h" and "moe" in config.layers_block_type


def tensors(model: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the name in transformers, the GGUF name, and the values of each tensor."""
    config = model.config
    for name, array in _parts(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = _multiplied(name, array, config) if config.model_type == "falcon_h1" else array
        yield name, _gguf_name(name), np.ascontiguousarray(_converted(name, array, config))


def _parts(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights, Granite's stacked halves under GGUF names."""
    experts = model.config.model_type == "granitemoehybrid" and model.config.num_local_experts
    end = "_shexp" if experts else ""
    for name, parameter in model.state_dict().items():
        array, stem = parameter.detach().float().numpy(), name.rpartition(".")[0]
        layer = ".".join(name.split(".")[1:3]).replace("layers", "blk")
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                yield f"{layer}.ffn_{part}_exps.weight", half
        elif stem.endswith("shared_mlp.input_linear"):
            for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                yield f"{layer}.ffn_{part}{end}.weight", half
        elif stem.endswith("shared_mlp.output_linear"):
            yield f"{layer}.ffn_down{end}.weight", array
        else:
            yield name, array


def _gguf_name(name: str) -> str:
    if name in TOP or name.startswith("blk."):
        return TOP.get(name, name)
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, _, kind = rest.rpartition(".")
    own = WHOLE.get(rest) or PARTS.get(rest) or f"{PARTS[stem]}.{kind}"
    return f"blk.{layer}.{own}"


def _converted(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if name.endswith(".A_log"):
        return -np.exp(array)[:, None]
    if name.endswith(".D"):
        return array[:, None]
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return array.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads and config.model_type != "falcon_h1":
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _multiplied(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Return a weight of Falcon-H1 times the multipliers of the config."""
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2]
    if module != "in_proj":
        return array * np.float32(factors.get(module, 1.0))
    group = config.mamba_n_groups * config.mamba_d_state
    rows = (config.mamba_d_ssm, config.mamba_d_ssm, group, group, config.mamba_n_heads)
    return array * np.repeat(np.float32(config.ssm_multipliers), rows)[:, None] * np.float32(config.ssm_in_multiplier)
