"""Granite 4 (IBM, 2025), the dense ones and those with Mamba 2 layers (H), with experts or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, with_multipliers
from tureen.models.mamba import KINDS, mamba2
from tureen.models.published import Published
from tureen.models.reading import integer, layer_kinds, layer_number
from tureen.weights.stored import Stored

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
FAMILIES = {
    "Granite 4": Published("ibm-granite/granite-4.0-350m", "0.4B, 1B, 3B", calls="granite4"),
    "Granite 4 H": Published("ibm-granite/granite-4.0-h-350m", "0.3B, 1.5B, 3B, 7B-A1B, 32B-A9B", calls="granite4"),
}
RENAMES = (
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.", ".mlp.experts.gate_up_proj."),
    (".block_sparse_moe.output_linear.", ".mlp.experts.down_proj."),
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
)
"""Parts of a checkpoint's names -> our names."""
SHARED = (".mlp.gate_up_proj.", ".mlp.down_proj.")


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    num_layers, shared_size = integer(hf, "num_hidden_layers"), integer(hf, "shared_intermediate_size", 1024)
    num_experts = layer_number(hf, "num_local_experts", 8)
    config = with_multipliers(hf if num_experts else {**hf, "intermediate_size": shared_size})
    listed = {"layer_types": hf.get("layer_types") or hf.get("layers_block_type")}
    kinds = [KINDS[kind] for kind in layer_kinds(listed, num_layers, tuple(KINDS), ["mamba"] * num_layers)]
    mixer = mamba2(hf) if "mamba" in kinds else None
    has_rope = hf.get("position_embedding_type") == "rope"
    return replace(
        config,
        mixers=tuple(mixer if kind == "mamba" else None for kind in kinds) if mixer else (),
        ropes=tuple(
            rope if has_rope and kind == "attention" else None for kind, rope in zip(kinds, config.ropes, strict=True)
        ),
        experts=(_experts(hf, num_experts, config, shared_size),) * num_layers if num_experts else (),
    )


def _experts(hf: Mapping[str, Any], count: int, config: ModelConfig, shared_size: int) -> Experts:
    experts = Experts(
        count=count,
        num_chosen=integer(hf, "num_experts_per_tok", 2),
        size=config.intermediate_size,
        is_normalised=True,
        shared_size=shared_size,
        has_shared_gate=False,
    )
    return checked(experts)


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields a weight; that of the shared mlp by the name that it has in a model with experts."""
    is_shared = config.experts and any(part in stored.name for part in SHARED)
    yield stored._replace(name=stored.name.replace(".mlp.", ".mlp.shared_expert.")) if is_shared else stored
