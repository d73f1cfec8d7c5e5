"""ERNIE 4.5 (Baidu, 2025), dense and with experts: neighbouring pairs rotated; a bias corrects the choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common
from tureen.models.published import Published
from tureen.models.reading import integer, layer_number
from tureen.models.ropes import interleaved

ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
FAMILIES = {
    "ERNIE 4.5": Published("baidu/ERNIE-4.5-0.3B-PT", "0.4B, 21B-A3B, 300B-A47B"),
}
RENAMES = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.moe_statics.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    has_experts = (hf.get("architectures") or [""])[0] == "Ernie4_5_MoeForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    config = common({**defaults, **({} if has_experts else {"num_key_value_heads": 2, "head_dim": 128}), **hf})
    bias = bool(hf.get("use_bias", False))
    config = replace(config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, ropes=interleaved(config.ropes))
    return replace(config, experts=_experts(hf, config.num_layers)) if has_experts else config


def _experts(hf: Mapping[str, Any], num_layers: int) -> tuple[Experts | None, ...]:
    size = integer(hf, "moe_intermediate_size", 1536)
    experts = Experts(
        count=integer(hf, "moe_num_experts", integer(hf, "num_experts", 64)),
        num_chosen=integer(hf, "moe_k", integer(hf, "num_experts_per_tok", 6)),
        size=size,
        is_normalised=True,
        shared_size=size * layer_number(hf, "moe_num_shared_experts", 2),
        has_shared_gate=False,
        has_correction=True,
    )
    first, every = layer_number(hf, "moe_layer_start_index", 1), integer(hf, "moe_layer_interval", 1)
    end = hf.get("moe_layer_end_index")
    last = num_layers - 1 if end in (None, -1) else layer_number(hf, "moe_layer_end_index", 0)
    return tuple(
        checked(experts) if first <= layer <= last and (layer + 1) % every == 0 else None for layer in range(num_layers)
    )
