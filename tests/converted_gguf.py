"""What llama.cpp's converter makes of a transformers model: the metadata, and the tensors by their GGUF names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

ARCHITECTURES = {
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granite",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "llama": "llama",
    "minicpm3": "minicpm3",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2vl"),
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen3_vl_text": "qwen3vl",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
"""By model_type."""
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOP |= {
    "model.altup_projections": "altup_proj",
    "model.altup_unembed_projections": "altup_unembd_proj",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
TOP |= {"model.embedding_norm": "token_embd_norm"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "attention_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "feedforward_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "shared_mlp.output_linear": "ffn_down",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **dict.fromkeys(("mlp.gate", "mlp.gate.wg", "mlp.router", "block_sparse_moe.router"), "ffn_gate_inp"),
    **{
        f"{block}.experts.{part}_proj": f"ffn_{part}_exps"
        for block in ("mlp", "block_sparse_moe")
        for part in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{block}.{part}_proj": f"ffn_{part}_shexp"
        for block in ("shared_expert", "shared_experts", "shared_mlp")
        for part in ("gate", "up", "down")
    },
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"self_attn.forget_gate.{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b")},
    **{f"self_attn.{name}_proj": f"ssm_{name}" for name in ("g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
WHOLE = {
    "linear_attn.A_log": "ssm_a",
    "self_attn.forget_gate.A_log": "ssm_a",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}
"""Names that do not end with weight or bias, here or there."""
POST_ATTENTION = (
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt-oss",
    "seed_oss",
    "qwen3next",
    "qwen35",
    "qwen35moe",
    "glm4moe",
    "olmo2",
    "exaone4",
)
"""Architectures whose post_attention_layernorm is called so; it is the ffn_norm of the others."""
INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
LAYER_NORM = ("cohere2", "command-r", "starcoder2")
SIGMOID = 2


def metadata(model: Any) -> dict[str, Any]:
    """Returns the metadata of a model, without those of its vocabulary."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    first = "norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps"
    epsilon = next(getattr(config, name) for name in first if hasattr(config, name))
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.layer_norm_{'' if architecture in LAYER_NORM else 'rms_'}epsilon": epsilon,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        **_rope_facts(config),
        **_window_facts(config),
        **_expert_facts(config),
        **FAMILIES.get(config.model_type, lambda model: {})(model),
    }
    return {"general.architecture": architecture, **_xielu(model)} | {
        f"{architecture}.{key}": value for key, value in facts.items()
    }


def tensors(model: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields the name in transformers, the GGUF name, and the values of each tensor."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    for name, array in _parts(model):
        if name == "lm_head.weight" and (
            config.tie_word_embeddings or architecture in ("cohere2", "command-r", "gemma")
        ):
            continue
        yield name, _gguf_name(name, architecture), np.ascontiguousarray(_converted(name, array, architecture, config))


def _parts(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights, those that the converter takes apart as parts."""
    for name, parameter in model.state_dict().items():
        array = parameter.detach().float().numpy()
        stem, _, last = name.rpartition(".")
        if ".altup_" in name or (stem.endswith("experts") and model.config.model_type == "gemma4_text"):
            yield from _of_gemma(model, name, array)
        elif stem.endswith("experts") and "proj" in last:
            yield from _expert_parts(stem, last, array, is_gpt_oss=model.config.model_type == "gpt_oss")
        elif stem.endswith("shared_mlp.input_linear"):
            block = "mlp" if model.config.model_type == "granitemoehybrid" else "mlp.shared_expert"
            for part, half in zip(("gate_proj", "up_proj"), np.split(array, 2), strict=True):
                yield f"{stem.removesuffix('shared_mlp.input_linear')}{block}.{part}.weight", half
        elif stem.endswith("shared_mlp.output_linear") and model.config.model_type == "granitemoeshared":
            yield f"{stem.removesuffix('shared_mlp.output_linear')}mlp.shared_expert.down_proj.weight", array
        elif stem.endswith(("self_attn.conv1d", "kv_b_proj", "in_proj_qkvz")):
            yield from _of_attention(stem, array, model.config)
        elif ".act_fn." not in name:
            yield name, array


def _of_attention(stem: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if stem.endswith("conv1d"):
        for part, third in zip("qkv", np.split(array, 3), strict=True):
            yield f"{stem.removesuffix('conv1d')}{part}_conv1d.weight", third
    elif stem.endswith("qkvz"):
        yield from _qkvz(stem.removesuffix("qkvz"), array, config)
    elif ARCHITECTURES[config.model_type] in ("deepseek2", "kimi-linear"):
        yield from _kv_b(stem.removesuffix("kv_b_proj"), array, config)
    else:
        yield f"{stem}.weight", array


def _of_gemma(model: Any, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of experts unchanged, and the matrices of all streams as one tensor."""
    stem = name.removesuffix("0.weight")
    if ".altup_" not in name:
        yield f"{name}.weight", array
    elif stem != name:
        own = [value.numpy() for key, value in model.state_dict().items() if key.startswith(stem)]
        yield f"{stem}weight", np.stack(own)


def _expert_parts(stem: str, last: str, array: np.ndarray, *, is_gpt_oss: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the matrices of all experts; those of gpt-oss are turned, with rows of gate and up in turn."""
    kind = "bias" if last.endswith("bias") else "weight"
    array = array.swapaxes(1, 2) if is_gpt_oss and kind == "weight" else array
    if last.startswith("down_proj"):
        yield f"{stem}.down_proj.{kind}", array
        return
    halves = [array[:, 0::2], array[:, 1::2]] if is_gpt_oss else np.split(array, 2, axis=1)
    yield f"{stem}.gate_proj.{kind}", halves[0]
    yield f"{stem}.up_proj.{kind}", halves[1]


def _kv_b(stem: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    by_head = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
    yield f"{stem}k_b_proj.weight", keys.swapaxes(1, 2)
    yield f"{stem}v_b_proj.weight", values


def _qkvz(stem: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // groups * config.linear_value_head_dim
    by_group = array.reshape(groups, -1, array.shape[1])
    parts = np.split(by_group, np.cumsum([key, key, value]), axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
    yield f"{stem}qkv.weight", np.concatenate([q, k, v])
    yield f"{stem}z.weight", z


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_facts(config: Any) -> dict[str, Any]:
    if not hasattr(config, "rope_parameters"):
        return {}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    facts: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        facts |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("longrope", "yarn"):
        facts["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if "mscale_all_dim" in rope:
        share = 0.1 if ARCHITECTURES[config.model_type] == "deepseek2" else 1.0
        facts["rope.scaling.yarn_log_multiplier"] = share * rope["mscale_all_dim"]
    if rope["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / rope["original_max_position_embeddings"]
        grown = (1 + math.log(stretch) / math.log(rope["original_max_position_embeddings"])) ** 0.5
        facts["rope.scaling.attn_factor"] = grown if stretch > 1 else 1.0
    if "llama_4_scaling_beta" in rope:
        facts["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    share = rope.get("partial_rotary_factor", 1.0)
    return facts | {"rope.dimension_count": int(_head_dim(config) * share)}


def _window_facts(config: Any) -> dict[str, Any]:
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "phi3", "starcoder2", "gpt_oss"):
        return {"attention.sliding_window": window} if window else {}
    if "sliding_attention" not in kinds:
        return {}
    pattern = [kind == "sliding_attention" for kind in kinds]
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}


def _expert_facts(config: Any) -> dict[str, Any]:
    names = ("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if count is None:
        return {}
    used = [getattr(config, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")]
    facts = {"expert_count": count, "expert_used_count": next(filter(None, used))}
    size = getattr(config, "moe_intermediate_size", None)
    if config.model_type in ("gpt_oss", "minimax_m2", "hunyuan_v1_moe"):
        size = config.intermediate_size
    if isinstance(size, int):
        facts["expert_feed_forward_length"] = size
    shared = getattr(config, "shared_expert_intermediate_size", None) or getattr(config, "shared_intermediate_size", 0)
    return facts | ({"expert_shared_feed_forward_length": shared} if shared else {})


def _granite(model: Any) -> dict[str, Any]:
    config = model.config
    facts = {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
    }
    if config.model_type == "granitemoehybrid":
        facts |= {"expert_count": 0, "expert_used_count": 0}
        facts |= {f"ssm.{key}": 4 for key in ("conv_kernel", "state_size", "group_count", "inner_size")}
        facts["attention.head_count_kv"] = [config.num_key_value_heads] * config.num_hidden_layers
        facts["feed_forward_length"] = facts["expert_shared_feed_forward_length"] = config.shared_intermediate_size
        if config.position_embedding_type != "rope":
            facts["rope.scaling.finetuned"] = False
    return facts


def _delta(model: Any) -> dict[str, Any]:
    config = model.config
    sections = {} if getattr(config, "model_type", "").endswith("next") else {"rope.dimension_sections": [2, 1, 1, 0]}
    return sections | {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
    }


def _ernie_moe(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
    }


def _glm_moe(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _latent(model: Any) -> dict[str, Any]:
    config = model.config
    length = config.qk_nope_head_dim + config.qk_rope_head_dim
    facts = {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": length,
        "attention.value_length": config.v_head_dim,
    }
    return facts | ({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {})


def _deepseek(model: Any) -> dict[str, Any]:
    config, facts = model.config, _latent(model)
    own = {f"attention.{kind}_length_mla": facts[f"attention.{kind}_length"] for kind in ("key", "value")}
    is_v2, groups = config.model_type == "deepseek_v2", getattr(config, "n_group", None)
    return {
        **facts,
        **own,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "expert_gating_func": 1 if is_v2 else SIGMOID,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        **({"expert_group_count": groups, "expert_group_used_count": config.topk_group} if groups else {}),
    }


def _lfm2(model: Any) -> dict[str, Any]:
    config = model.config
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
        "feed_forward_length": model.model.layers[0].feed_forward.w1.out_features,
    }


def _gemma4(model: Any) -> dict[str, Any]:
    config, attention = model.config, [layer.self_attn for layer in model.model.layers]
    full = next(own.head_dim for own in attention if not own.is_sliding)
    own = config.num_hidden_layers - config.num_kv_shared_layers
    counts = {True: config.num_key_value_heads, False: full_heads(model)}
    facts = {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [counts[layer.is_sliding] for layer in attention],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    if config.use_double_wide_mlp:
        sizes = [config.intermediate_size * (1 if layer < own else 2) for layer in range(config.num_hidden_layers)]
        facts["feed_forward_length"] = sizes
    if config.final_logit_softcapping is not None:
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    return facts


def full_heads(model: Any) -> int:
    """Returns the number of key heads of layers without a window."""
    own = next(layer.self_attn for layer in model.model.layers if not layer.self_attn.is_sliding)
    return own.k_proj.out_features // own.head_dim


def _kimi(model: Any) -> dict[str, Any]:
    config, facts = model.config, _latent(model)
    own = {f"attention.{kind}_length_mla": facts[f"attention.{kind}_length"] for kind in ("key", "value")}
    return {
        **facts,
        **own,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": SIGMOID,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _gemma3n(model: Any) -> dict[str, Any]:
    config = model.config
    shares = torch.tensor(config.activation_sparsity_pattern)
    return {
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": torch.distributions.normal.Normal(0, 1).icdf(shares).tolist(),
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


FAMILIES = {
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _deepseek),
    "kimi_linear": _kimi,
    "minicpm3": _latent,
    **dict.fromkeys(("cohere", "cohere2"), lambda model: {"logit_scale": model.config.logit_scale}),
    "ernie4_5_moe": _ernie_moe,
    "gemma2": lambda model: {
        "attn_logit_softcapping": model.config.attn_logit_softcapping,
        "final_logit_softcapping": model.config.final_logit_softcapping,
    },
    "glm4_moe": _glm_moe,
    "hunyuan_v1_moe": lambda model: {
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": model.config.intermediate_size,
    },
    "lfm2": _lfm2,
    "minimax_m2": lambda model: {"expert_gating_func": SIGMOID},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"), _granite),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta),
}
"""What some families have beside the common facts, by model_type."""


def _xielu(model: Any) -> dict[str, Any]:
    """Returns the numbers of xIELU, which are metadata."""
    numbers: dict[str, list[float]] = {}
    for name, parameter in model.state_dict().items():
        if ".act_fn." in name:
            numbers.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(parameter.item())
    return numbers


def rope_tensors(config: Any) -> Mapping[str, np.ndarray]:
    rope = getattr(config, "rope_parameters", {})
    if config.model_type == "gemma4_text":
        size = config.per_layer_config["full_attention"].head_dim
        turning = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (size // 2 - turning), np.float32)}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(rope, _head_dim(config))}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for index in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (index / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(divisors, np.float32)


def _gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    if rest in WHOLE:
        return f"blk.{layer}.{WHOLE[rest]}"
    own = rest.rsplit(".", 1)[0]
    if own == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if architecture in POST_ATTENTION else 'ffn_norm'}.{kind}"
    return f"blk.{layer}.{LAYER_NAMES[own]}.{kind}"


def _converted(name: str, array: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        array = _tiled(name.partition(".linear_attn.")[2], array, config)
    if name.endswith("A_log"):
        return -np.exp(array)
    if architecture in PLUS_ONE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return array + 1
    if name.endswith(("shared_expert_gate.weight", "correction_bias")):
        return array.reshape(-1)
    if name.endswith(tuple(f"{part}_conv1d.weight" for part in "qkv")):
        return array.swapaxes(0, 1)[:, :, None]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return array.squeeze(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture in INTERLEAVED and heads:
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _tiled(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Returns the weight with value heads of a key head num_key_heads apart, where they were neighbours."""
    groups, heads, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim
    if name.startswith("norm"):
        return array
    if name.startswith("out_proj"):
        by_head = array.reshape(len(array), groups, heads // groups, dim)
        return by_head.swapaxes(1, 2).reshape(array.shape)
    first = keys if name.startswith(("in_proj_qkv", "conv1d")) else 0
    values = array[first:]
    values = values.reshape(groups, heads // groups, len(values) // heads, *array.shape[1:]).swapaxes(0, 1)
    return np.concatenate([array[:first], values.reshape(array[first:].shape)])
