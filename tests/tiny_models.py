"""Tiny models with random weights, written by transformers as folders; the oracle holds the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": GEMMA_ROPES,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 48,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SHARED = GEMMA4 | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 24,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
QWEN_MOE = {
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
QWEN2_MOE = {
    "moe_intermediate_size": 64,  # as the hidden size
    "shared_expert_intermediate_size": 80,
    "norm_topk_prob": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GLM_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GLM_MOE = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "rope_parameters": GLM_ROPE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "attention_bias": True,
}
ERNIE_MOE = {
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
    "use_bias": False,
}
GRANITE_DENSE = {
    "num_local_experts": 0,
    "layer_types": ["full_attention", "full_attention"],
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
}
QWEN_LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
QWEN_LINEAR_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.3, 1.5],
}
GRANITE_H = MAMBA | {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 80,
}
NEMOTRON = {
    "hybrid_override_pattern": "MM-*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 16,
    "head_dim": 32,
    "time_step_min": 1e-9,  # transformers takes it for the least time step; NVIDIA's own code does not
}
FALCON = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "q_lora_rank": 48,
}
DEEPSEEK = LATENT | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
DEEPSEEK_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2}
OF_STATE_SPACE = (".A_log", ".dt_bias", ".D", ".conv1d.weight", ".conv1d.bias")
"""Ends of names of weights on which decays and time steps depend: large enough that these differ from head to head."""
CLEAR = 2e-4
"""Between the logarithms of the best two tokens, each of which tests allow to be 1e-4 off in float32."""
VARIANTS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 10}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma4": (
        "Gemma4Text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
    "gemma4-shared": ("Gemma4Text", GEMMA4_SHARED),
    "gemma4-moe": (
        "Gemma4Text",
        GEMMA4_SHARED | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 5,
            "head_dim": 32,
            "intermediate_size": [96, 64, 96, 96, 128],
            "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0, 0.0],
            "sliding_window": 12,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
            "rope_parameters": GEMMA_ROPES,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 250,
            "hidden_size_per_layer_input": 24,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
        },
    ),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12}),
    "gemma2-softcaps": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3": ("Phi3", {"sliding_window": 10}),
    "granite": ("Granite", GRANITE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", QWEN_MOE | QWEN2_MOE),
    "qwen3-moe": ("Qwen3Moe", QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 10}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "glm": ("Glm", {"head_dim": 32, "attention_bias": True, "rope_parameters": GLM_ROPE}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "rope_parameters": GLM_ROPE}),
    "glm4-moe": ("Glm4Moe", GLM_MOE),
    "ernie4-5": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "ernie4-5-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32, "attention_bias": True}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 32, "num_experts": 6, "moe_topk": 3}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 10, "head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True, "residual_dropout": 0.0}),
    "granite-moe": ("GraniteMoe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 80},
    ),
    "granite4": ("GraniteMoeHybrid", GRANITE | GRANITE_DENSE),
    "granite4-h": (
        "GraniteMoeHybrid",
        GRANITE | GRANITE_H | {"num_local_experts": 0, "mamba_n_groups": 1},
    ),
    "granite4-h-moe": (
        "GraniteMoeHybrid",
        GRANITE
        | GRANITE_H
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": ("Bamba", MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mlp_bias": True}),
    "nemotron-h": ("NemotronH", NEMOTRON | {"mlp_bias": True}),
    "nemotron-h-moe": (
        "NemotronH",
        NEMOTRON
        | {
            "hybrid_override_pattern": "ME*-ME",
            "use_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-norm": (
        "FalconH1",
        FALCON
        | {
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32},
    ),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "starcoder2": ("Starcoder2", {"use_bias": True, "sliding_window": 10}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 10, "logit_scale": 0.5}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_bias": True,
            "intermediate_size": 144,
            "block_multiple_of": 32,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        QWEN_LINEAR
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3-5": ("Qwen3_5Text", QWEN_LINEAR),
    "qwen3-5-moe": (
        "Qwen3_5MoeText",
        QWEN_LINEAR
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 10,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN, "attention_bias": True},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        DEEPSEEK | {"n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_YARN, "attention_bias": True},
    ),
    "kimi-linear": (
        "KimiLinear",
        LATENT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", DEEPSEEK | {"rope_interleave": False}),
    "minicpm3": ("MiniCPM3", LATENT | {"scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 40, "v_head_dim": 16}),
    "apertus": ("Apertus", {"head_dim": 32, "attention_bias": True}),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 6, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    ),
}


def write(folder: Path, variant: str, *, dtype: torch.dtype = torch.float32, **more: object) -> torch.nn.Module:
    """Writes config.json and model.safetensors; returns the transformers model in float32, as loaded from them.

    more: keys of the config beside those of the variant.
    """
    family, changes = VARIANTS[variant]
    changes = changes | more
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model_class = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(len(variant))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config).to(dtype)
        spread(model)
        model.save_pretrained(folder)
    model.config._attn_implementation = "eager"
    model.config.allow_global_per_layer_attribute_access = True  # layers may have key sizes of their own
    return model.float().eval()


def saved(folder: Path, name: str, config: object, seed: int) -> torch.nn.Module:
    """Writes a model of the transformers class with that name and random weights; returns it in float32."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(config)
        spread(model)
        model.save_pretrained(folder)
    return model.eval()


def spread(model: torch.nn.Module) -> None:
    """Weights large enough that logits differ clearly from token to token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)
            if name.endswith(OF_STATE_SPACE) and "linear_attn" not in name:
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(std=0.15)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
            if name.endswith(("_min", "_max")):  # bounds that cut some of what goes through a product
                buffer.uniform_(0.1, 0.5).mul_(-1 if name.endswith("_min") else 1)
                buffer.mul_(0.1 if "down_proj" in name else 1)
            if name.endswith(("std_bias", "std_scale")):
                buffer.normal_(1.0)


@torch.no_grad()
def logprobs(model: torch.nn.Module, token_ids: list[int], *, last: int = 0) -> torch.Tensor:
    """float32 [tokens, vocab]: log-probabilities of the next token after each, or after so many at the end."""
    return torch.log_softmax(model(torch.tensor([token_ids]), logits_to_keep=last).logits[0].float(), dim=-1)


@torch.no_grad()
def greedy(
    model: torch.nn.Module, prompt: list[int], count: int, *, clear: float = CLEAR, draft: Sequence[int] = ()
) -> list[int]:
    """A text to compare with is refused where arithmetic that rounds otherwise could choose another token.

    `draft` changes nothing but the work: as much of it as the model would have written is computed at once.
    """
    token_ids = [*prompt]
    while len(token_ids) < len(prompt) + count:
        ahead = list(draft[len(token_ids) - len(prompt) : count - 1])
        for row in logprobs(model, token_ids + ahead)[len(token_ids) - 1 :]:
            (best, second), (token_id, _) = (found.tolist() for found in row.topk(2))
            if best - second < clear:
                number = len(token_ids) - len(prompt)
                raise ValueError(
                    f"token {number}: {best - second:.5f} before the next best, not {clear}: take other prompts"
                )
            token_ids.append(token_id)
            if not ahead or ahead.pop(0) != token_id:
                break
    return token_ids[len(prompt) :]
