"""LFM2 and LFM2.5 (arXiv:2511.23404): short gated convolutions, with attention in some of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.mixers import ShortConv
from tureen.models.config import ModelConfig, common
from tureen.models.mamba import kernel
from tureen.models.published import Published
from tureen.models.reading import fault, integer, layer_kinds, number

ARCHITECTURES = ("Lfm2ForCausalLM",)
FAMILIES = {
    "LFM2, LFM2.5": Published("LiquidAI/LFM2-350M", "0.4B, 0.7B, 1.2B, 2.6B", calls="lfm2"),
}
RENAMES = (
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn.q_layernorm.", ".self_attn.q_norm."),
    (".self_attn.k_layernorm.", ".self_attn.k_norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.embedding_norm.", "model.norm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)
"""Parts of a checkpoint's names -> our names."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {
        "num_key_value_heads": 8,
        "rope_theta": hf.get("theta", 1_000_000.0),
        "tie_word_embeddings": hf.get("tie_embedding", True),
        **hf,
        "rms_norm_eps": number(hf, "norm_eps", 1e-5),
    }
    config = common({**hf, "intermediate_size": _inner_size(hf)})
    kinds = _kinds(hf, config.num_layers)
    conv = ShortConv(config.hidden_size, kernel(hf, "conv_L_cache", 3), bool(hf.get("conv_bias", False)))
    return replace(
        config,
        qk_norm="head",
        mixers=tuple(conv if kind == "conv" else None for kind in kinds),
        ropes=tuple(None if kind == "conv" else rope for kind, rope in zip(kinds, config.ropes, strict=True)),
    )


def _inner_size(hf: Mapping[str, Any]) -> int:
    """Returns the intermediate size, which a config may give as that of an mlp without a gate."""
    size = integer(hf, "block_ff_dim", integer(hf, "intermediate_size", 12288))
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    multiple = integer(hf, "block_multiple_of", 256)
    size = int(number(hf, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def _kinds(hf: Mapping[str, Any], num_layers: int) -> list[str]:
    full = hf.get("full_attn_idxs")
    full = [*range(num_layers)] if full is None else full
    if not isinstance(full, list):
        raise fault("full_attn_idxs", f"must be a list of layers, got {echo(full)}")
    usual = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    return layer_kinds(hf, num_layers, ("conv", "full_attention"), usual)
