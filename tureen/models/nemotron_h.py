"""Nemotron-H and Nemotron 3 Nano (NVIDIA, arXiv:2504.03624): each layer has Mamba 2, attention, an mlp or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.mixers import Mamba2
from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common
from tureen.models.mamba import KINDS, checked_mamba, has, kernel, step_limits
from tureen.models.published import Published
from tureen.models.reading import fault, integer, number, refuse

ARCHITECTURES = ("NemotronHForCausalLM",)
FAMILIES = {
    "Nemotron-H, Nemotron 3 Nano": Published(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "8.9B, 12B, 31B-A3B", thoughts="qwen3"
    )
}
RENAMES = (
    ("backbone.", "model."),
    (".norm.", ".input_layernorm."),
    (".mixer.input_layernorm.", ".mamba.norm."),
    ("model.norm_f.", "model.norm."),
    ("model.embeddings.", "model.embed_tokens."),
    *((f".mixer.{name}", f".mamba.{name}") for name in ("in_proj.", "conv1d.", "A_log", "D", "dt_bias", "out_proj.")),
    *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
    (".mixer.shared_experts.", ".mlp.shared_expert."),
    (".mixer.", ".mlp."),
)
"""Parts of a checkpoint's names -> our names."""
IN_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern -> kinds of layers."""
IN_LIST = {**KINDS, "mlp": "mlp", "moe": "moe"}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    refuse(
        hf,
        attention_bias=False,
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
        moe_latent_size=None,
        n_shared_experts=1,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    kinds = _kinds(hf)
    own = {
        "num_hidden_layers": len(kinds),
        "hidden_act": hf.get("mlp_hidden_act") or "relu2",
        "rms_norm_eps": number(hf, "layer_norm_epsilon", 1e-5),
        "head_dim": hf.get("head_dim") or hf.get("attention_head_dim") or 128,  # the second in older configs
    }
    config = common({"num_key_value_heads": 8, "intermediate_size": 21504, **hf, **own})
    mixer = _mixer(hf) if "mamba" in kinds else None
    experts = _experts(hf) if "moe" in kinds else None
    mlp_bias = has(hf, "mlp_bias", default=False)
    if experts and mlp_bias:
        raise fault("mlp_bias", "true is not supported in a model with experts; only false is")
    return replace(
        config,
        parts=tuple("mlp" if kind in ("mlp", "moe") else "mixer" for kind in kinds),
        mixers=tuple(mixer if kind == "mamba" else None for kind in kinds),
        ropes=(None,) * len(kinds),
        experts=tuple(experts if kind == "moe" else None for kind in kinds) if experts else (),
        gated_mlp=False,
        mlp_bias=mlp_bias,
    )


def _kinds(hf: Mapping[str, Any]) -> list[str]:
    """Returns the kind of each layer."""
    key = next((key for key in ("layers_block_type", "layer_types") if hf.get(key)), "hybrid_override_pattern")
    names, layers = IN_PATTERN if key == "hybrid_override_pattern" else IN_LIST, hf.get(key)
    if not isinstance(layers, (list, str)) or not layers or any(name not in tuple(names) for name in layers):
        raise fault(key, f"must say {', '.join(names)} for each layer, got {echo(layers)}")
    count = hf.get("num_hidden_layers")
    if count is not None and count != len(layers):
        raise fault("num_hidden_layers", f"{echo(count)} is not the number of layers in {key}, {len(layers)}")
    return [names[name] for name in layers]


def _mixer(hf: Mapping[str, Any]) -> Mamba2:
    mixer = Mamba2(
        num_heads=integer(hf, "mamba_num_heads", 128),
        head_dim=integer(hf, "mamba_head_dim", 64),
        state_dim=integer(hf, "ssm_state_size", 128),
        num_groups=integer(hf, "n_groups", 8),
        kernel=kernel(hf, "conv_kernel", 4),
        conv_bias=has(hf, "use_conv_bias", default=True),
        in_bias=has(hf, "use_bias", default=False),
        out_bias=has(hf, "use_bias", default=False),
        step_limits=step_limits(hf),
    )
    return checked_mamba(mixer, groups="n_groups")


def _experts(hf: Mapping[str, Any]) -> Experts:
    experts = Experts(
        count=integer(hf, "n_routed_experts", 8),
        num_chosen=integer(hf, "num_experts_per_tok", 2),
        size=integer(hf, "moe_intermediate_size", 7688),
        is_normalised=has(hf, "norm_topk_prob", default=True),
        shared_size=integer(hf, "moe_shared_expert_intermediate_size", 7688),
        has_shared_gate=False,
        score="sigmoid",
        has_correction=True,
        factor=number(hf, "routed_scaling_factor", 1.0),
        num_groups=integer(hf, "n_group", 1),
        num_chosen_groups=integer(hf, "topk_group", 1),
    )
    return checked(experts)
