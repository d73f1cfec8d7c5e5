"""Granite 3 (IBM, 2024): Llama's block with multipliers for embeddings, residuals, attention and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, with_multipliers
from tureen.models.published import Published

ARCHITECTURES = ("GraniteForCausalLM",)
FAMILIES = {
    "Granite 3": Published("ibm-granite/granite-3.3-2b-instruct", "2.5B, 8B", calls="granite"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    return replace(with_multipliers(hf), mlp_bias=bool(hf.get("mlp_bias", False)))
