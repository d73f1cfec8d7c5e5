"""Phi-3 and Phi-4 (arXiv:2404.14219, 2503.01743): Llama's block, its checkpoints with q, k, v and gate, up in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.ropes import rope_parameters

ARCHITECTURES = ("Phi3ForCausalLM",)
FAMILIES = {
    "Phi-3, Phi-4": Published("microsoft/Phi-4-mini-instruct", "3.8B, 14B", thoughts="qwen3"),
}

OLD_ROPES = ("su", "yarn")
"""Older names of longrope in published configs."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    parameters = dict(rope_parameters(hf))
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind in OLD_ROPES:
        parameters["rope_type"] = "longrope"
    hf = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, **hf, "rope_parameters": parameters}
    config = common(hf)
    slides = hf.get("sliding_window") is not None
    windows = sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers)
    return replace(config, windows=windows)
