"""EXAONE 4 (arXiv:2507.11407): norms follow attention and mlp; layers without a window leave positions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import fault

ARCHITECTURES = ("Exaone4ForCausalLM",)
FAMILIES = {
    "EXAONE 4": Published("LGAI-EXAONE/EXAONE-4.0-1.2B", "1.3B, 32B", calls="hermes", thoughts="qwen3"),
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, **hf}
    config = replace(common(hf), norms="post", qk_norm="head")
    if hf.get("sliding_window", 4096) is None:
        return config
    windows = sliding_windows({"sliding_window": 4096, **hf}, config.num_layers, _slides(hf, config.num_layers))
    ropes = tuple(None if window is None else rope for window, rope in zip(windows, config.ropes, strict=True))
    return replace(config, windows=windows, ropes=ropes)


def _slides(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns for each layer whether it has a window: by a pattern of L (window) and G, or all but every n-th."""
    pattern = hf.get("sliding_window_pattern") or 4
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [pattern[layer % len(pattern)] == "L" and layer < num_layers - 1 for layer in range(num_layers)]
    if type(pattern) is not int or pattern < 1:
        raise fault("sliding_window_pattern", f"must be a positive integer or letters L and G, got {echo(pattern)}")
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
