"""OLMo 2 and 3 (arXiv:2501.00656, 2512.13961): norms follow attention and mlp; q and k are normalised whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import number, refuse
from tureen.models.ropes import rope_parameters, ropes_of_windows, without_ropes

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
FAMILIES = {
    "OLMo 2": Published("allenai/OLMo-2-0425-1B-Instruct", "1.5B, 7B, 13B, 32B"),
    "OLMo 3": Published("allenai/Olmo-3-7B-Instruct", "7B, 32B", calls="olmo3", thoughts="qwen3"),
}
FULL_EVERY = 4  # layers of OLMo 3, unless the config says otherwise


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1e-5, **hf}
    refuse(hf, clip_qkv=None)
    is_third = (hf.get("architectures") or [""])[0] == "Olmo3ForCausalLM"
    config = common(without_ropes(hf) if is_third else hf)
    bias = bool(hf.get("attention_bias", False))
    config = replace(config, qkv_bias=bias, out_bias=bias, norms="post", qk_norm="all")
    if not is_third:
        return config
    slides = [(layer + 1) % FULL_EVERY != 0 for layer in range(config.num_layers)]
    windows = sliding_windows({"sliding_window": 4096, **hf}, config.num_layers, slides)
    theta = number({"rope_theta": hf.get("rope_theta"), **rope_parameters(hf)}, "rope_theta", 500_000.0)
    return replace(config, windows=windows, ropes=ropes_of_windows(hf, windows, local_theta=theta, full_theta=theta))
