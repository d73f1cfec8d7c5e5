"""Mixtral (arXiv:2401.04088): Mistral with eight mlps a layer, of which each token uses two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import EXPERT_NAMES, ModelConfig, checked, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import integer

ARCHITECTURES = ("MixtralForCausalLM",)
FAMILIES = {
    "Mixtral": Published("mistralai/Mixtral-8x7B-Instruct-v0.1", "47B-A13B, 141B-A39B"),
}
RENAMES = (
    (".block_sparse_moe.", ".mlp."),
    *EXPERT_NAMES,
)
"""Parts of a checkpoint's names -> what they are called here."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"rms_norm_eps": 1e-5, "num_key_value_heads": 8, **hf})
    slides = hf.get("sliding_window") is not None
    experts = Experts(
        count=integer(hf, "num_local_experts", 8),
        num_chosen=integer(hf, "num_experts_per_tok", 2),
        size=config.intermediate_size,
        is_normalised=True,
    )
    return replace(
        config,
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
        experts=(checked(experts),) * config.num_layers,
    )
