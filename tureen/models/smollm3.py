"""SmolLM3 (Hugging Face, 2025): Llama's block; every fourth layer leaves positions out (arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import fault, integer

ARCHITECTURES = ("SmolLM3ForCausalLM",)
FAMILIES = {
    "SmolLM3": Published("HuggingFaceTB/SmolLM3-3B", "3B", calls="hermes", thoughts="qwen3"),
}
THETA = 2_000_000.0


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    config = common({"rope_theta": THETA, "tie_word_embeddings": True, "num_key_value_heads": 4, **hf})
    bias = bool(hf.get("attention_bias", False))
    turns = _turning(hf, config.num_layers)
    slides = [bool(hf.get("use_sliding_window")) and not turn for turn in turns]
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        windows=sliding_windows(hf, config.num_layers, slides) if any(slides) else config.windows,
        ropes=tuple(rope if turn else None for rope, turn in zip(config.ropes, turns, strict=True)),
    )


def _turning(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns for each layer whether it rotates q and k."""
    flags = hf.get("no_rope_layers")
    if flags is None:
        every = integer(hf, "no_rope_layer_interval", 4)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(value not in (0, 1) for value in flags):
        raise fault("no_rope_layers", f"must have a 1 or 0 for each of {num_layers} layers, got {echo(flags)}")
    return [bool(value) for value in flags[:num_layers]]
