"""StarCoder2 (arXiv:2402.19173): layer norms, biases, and an mlp without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.models.config import ModelConfig, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import number

ARCHITECTURES = ("Starcoder2ForCausalLM",)
FAMILIES = {
    "StarCoder2": Published("bigcode/starcoder2-3b", "3B, 7B, 16B"),
}
RENAMES = ((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    eps = number(hf, "norm_epsilon", 1e-5)
    hf = {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "tie_word_embeddings": True, **hf}
    config = common({**hf, "rms_norm_eps": eps})
    bias = bool(hf.get("use_bias", True))
    slides = hf.get("sliding_window") is not None
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        layer_norm=True,
        norm_bias=True,
        windows=sliding_windows(hf if slides else {}, config.num_layers, [slides] * config.num_layers),
    )
