"""Granite 3 with experts (IBM, 2024), and those that share an mlp among all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, with_multipliers
from tureen.models.published import Published
from tureen.models.reading import integer, layer_number

ARCHITECTURES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
FAMILIES = {
    "Granite 3 MoE": Published("ibm-granite/granite-3.1-1b-a400m-instruct", "1.3B-A0.4B, 3.3B-A0.8B", calls="granite"),
}
RENAMES = (
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.", ".mlp.experts.gate_up_proj."),
    (".block_sparse_moe.output_linear.", ".mlp.experts.down_proj."),
    (".shared_mlp.input_linear.", ".mlp.shared_expert.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.shared_expert.down_proj."),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = with_multipliers(hf)
    is_shared = config.architecture == "GraniteMoeSharedForCausalLM"
    experts = Experts(
        count=integer(hf, "num_local_experts", 8),
        num_chosen=integer(hf, "num_experts_per_tok", 2),
        size=config.intermediate_size,
        is_normalised=True,
        shared_size=layer_number(hf, "shared_intermediate_size", 0) if is_shared else 0,
        has_shared_gate=False,
    )
    return replace(config, experts=(checked(experts),) * config.num_layers)
