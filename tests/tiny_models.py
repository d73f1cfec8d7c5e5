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
CLEAR = 2e-4
"""Between the logarithms of the best two tokens, each of which tests allow to be 1e-4 off in float32."""
VARIANTS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 10}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12}),
    "gemma2-softcaps": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "phi3": ("Phi3", {"sliding_window": 10}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "granite": ("Granite", GRANITE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", QWEN_MOE | QWEN2_MOE),
    "qwen3-moe": ("Qwen3Moe", QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
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
    return model.float().eval()


def spread(model: torch.nn.Module) -> None:
    """Weights large enough that logits differ clearly from token to token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)


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
