"""Command R and Aya, Command R7B and Command A (Cohere, 2024): attention and mlp get the same normalised input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import integer, number, refuse
from tureen.models.ropes import interleaved

ARCHITECTURES = ("Cohere2ForCausalLM", "CohereForCausalLM")
FAMILIES = {
    "Command R7B, Command A": Published(
        "CohereLabs/c4ai-command-r7b-12-2024", "8B, 111B", calls="cohere_command3", thoughts="cohere-command3"
    ),
    "Command R, Aya 23 and Expanse": Published("CohereLabs/aya-expanse-8b", "8B, 32B, 35B"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"tie_word_embeddings": True, **hf}
    refuse(hf, use_qk_norm=False)
    config = common({**hf, "rms_norm_eps": number(hf, "layer_norm_eps", 1e-5)})
    windows, ropes = config.windows, interleaved(config.ropes)
    if hf.get("model_type") != "cohere":  # layers without a window have no rope
        refuse(hf, use_parallel_block=True, use_gated_activation=True)
        windows = _windows(hf, config.num_layers)
        ropes = tuple(None if window is None else rope for window, rope in zip(windows, ropes, strict=True))
    bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        norms="parallel",
        layer_norm=True,
        windows=windows,
        ropes=ropes,
        logit_scale=number(hf, "logit_scale", 0.0625),
    )


def _windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    every = integer(hf, "sliding_window_pattern", integer(hf, "_sliding_window_pattern", 4))
    slides = [(layer + 1) % every != 0 for layer in range(num_layers)]
    return sliding_windows({"sliding_window": 4096, **hf}, num_layers, slides)
