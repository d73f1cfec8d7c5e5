"""GLM-4-9B and GLM-Edge (arXiv:2406.12793): half of each head is rotated, in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common
from tureen.models.published import Published
from tureen.models.ropes import interleaved

ARCHITECTURES = ("GlmForCausalLM",)
FAMILIES = {
    "GLM-4, GLM-Edge": Published("zai-org/glm-edge-1.5b-chat", "1.6B, 4B, 9B"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, **hf}
    config = common(hf)
    return replace(
        config,
        qkv_bias=bool(hf.get("attention_bias", True)),
        ropes=interleaved(config.ropes),
    )
