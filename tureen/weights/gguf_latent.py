"""Reads models with latent attention from the metadata of a GGUF file.

Source: llama.cpp's src/models/deepseek2.cpp, kimi-linear.cpp and minicpm3.cpp, and its converter.
"""

from __future__ import annotations

from typing import Final

from tureen.errors import echo
from tureen.weights.gguf_experts import SHARED, SIGMOID, SOFTMAX, Config, experts, shared
from tureen.weights.gguf_facts import GgufFacts

READ: Final = (
    *SHARED,
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "leading_dense_block_count",
)
"""Keys about experts that are read here."""


def _latent(facts: GgufFacts, config: Config) -> Config:
    """Returns the sizes of latent attention. Files with separate matrices for each head use other keys for them."""
    own = "_mla" if facts.get("attention.key_length_mla") else ""
    if own:
        for key in ("key_length", "value_length"):
            facts.stored(f"attention.{key}")  # in the latent's space
    turned = config["head_dim"]
    length = facts.count(f"attention.key_length{own}")
    if length <= turned:
        raise facts.fault(
            f"{facts.architecture}.attention.key_length{own} must be more than rope.dimension_count {turned}, "
            f"got {length}"
        )
    return {
        "num_key_value_heads": None,
        "q_lora_rank": facts.optional_count("attention.q_lora_rank"),
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": length - turned,
        "v_head_dim": facts.count(
            f"attention.value_length{own}", config["hidden_size"] // config["num_attention_heads"]
        ),
        "attention_bias": facts.has("blk.0.attn_kv_a_mqa.bias"),
    }


def deepseek2(facts: GgufFacts, config: Config) -> Config:
    """Returns DeepSeek V3's entries if sigmoids choose the experts, else V2's. Older files do not name the function;
    only sigmoids come with a correction."""
    scaling, key = config["rope_scaling"], "rope.scaling.yarn_log_multiplier"
    if scaling and facts.get(key):
        stretch = facts.number(key) * 10  # files of this architecture store a tenth of it
        scaling = {**scaling, "mscale": stretch, "mscale_all_dim": stretch}
    has_correction = facts.has_any("exp_probs_b.bias")
    choice = facts.get("expert_gating_func") or (SIGMOID if has_correction else SOFTMAX)
    if choice not in (SOFTMAX, SIGMOID):
        raise facts.unsupported(f"deepseek2.expert_gating_func {echo(choice)} is not supported")
    is_v3 = choice == SIGMOID
    is_normalised = bool(facts.get("expert_weights_norm"))
    if is_normalised and not is_v3:
        raise facts.unsupported("deepseek2.expert_weights_norm true with a softmax is not supported")
    groups = facts.optional_count("expert_group_count") or 1
    count, used = experts(facts, **dict.fromkeys(READ))
    size = facts.count("expert_feed_forward_length")
    return {
        **_latent(facts, config),
        "architectures": [f"Deepseek{'V3' if is_v3 else 'V2'}ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "rope_scaling": scaling,
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "n_shared_experts": shared(facts, size),
        "first_k_dense_replace": facts.optional_count("leading_dense_block_count") or 0,
        "routed_scaling_factor": facts.factor("expert_weights_scale", 1.0),
        "norm_topk_prob": is_normalised,
        "n_group": groups,
        "topk_group": facts.optional_count("expert_group_used_count") or 1,
        **({} if is_v3 else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}),
    }


def kimi_linear(facts: GgufFacts, config: Config) -> Config:
    """Returns Kimi Linear's entries. Layers without key heads have a delta rule."""
    has_attention = facts.are_set("attention.head_count_kv", config["num_hidden_layers"])
    if facts.get("expert_gating_func") != SIGMOID:
        choice = echo(facts.get("expert_gating_func"))
        raise facts.unsupported(f"kimi-linear.expert_gating_func must be {SIGMOID}, got {choice}")
    count, used = experts(facts, **dict.fromkeys(READ))
    size = facts.count("expert_feed_forward_length")
    return {
        **_latent(facts, config),
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if is_set else "linear_attention" for is_set in has_attention],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": facts.count("kda.head_dim"),
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "num_experts": count,
        "num_experts_per_token": used,
        "moe_intermediate_size": size,
        "num_shared_experts": shared(facts, size),
        "first_k_dense_replace": facts.optional_count("leading_dense_block_count") or 0,
        "routed_scaling_factor": facts.factor("expert_weights_scale", 1.0),
        "moe_renormalize": facts.get("expert_weights_norm") in (None, True),  # converters do not write it
        "num_expert_group": facts.optional_count("expert_group_count") or 1,
        "topk_group": facts.optional_count("expert_group_used_count") or 1,
    }


def minicpm3(facts: GgufFacts, config: Config) -> Config:
    """Returns MiniCPM3's entries, with the factors that llama.cpp uses for every file."""
    return {
        "model_type": "minicpm3",
        **_latent(facts, config),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
