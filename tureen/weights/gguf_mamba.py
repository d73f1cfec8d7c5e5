"""Reads models with Mamba 2 layers from the metadata of a GGUF file.

Source: llama.cpp's src/models/falcon-h1.cpp, granite-hybrid.cpp and nemotron-h.cpp, and its converter.
"""

from __future__ import annotations

from typing import Final

from tureen.errors import echo
from tureen.weights.gguf_experts import SIGMOID, Config, experts, mixtral_experts
from tureen.weights.gguf_facts import GgufFacts

NAMES: Final = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")
NEMOTRON_NAMES: Final = (
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias",
)  # fmt: skip
"""Keys of config.json, in the order of `_mixer`'s values."""
NEMOTRON_EXPERTS: Final[dict[str, object]] = {
    "expert_gating_func": SIGMOID,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": None,
    "expert_weights_norm": None,
    "expert_weights_scale": None,
    "expert_group_count": None,
    "expert_group_used_count": None,
}
"""Keys of Nemotron's experts -> their value; None: `nemotron_h_moe` reads it."""


def _mixer(facts: GgufFacts, names: tuple[str, ...]) -> Config:
    """Returns the sizes of Mamba layers under these names. Raises StartupError."""
    width = facts.count("ssm.inner_size")
    heads = _divisor(facts, "ssm.time_step_rank", "ssm.inner_size", width)
    values = (
        heads,
        width // heads,
        facts.count("ssm.state_size"),
        _divisor(facts, "ssm.group_count", "ssm.time_step_rank", heads),
        facts.count("ssm.conv_kernel"),
        facts.has_any(".ssm_conv1d.bias"),
    )
    return dict(zip(names, values, strict=True))


def _divisor(facts: GgufFacts, key: str, of: str, size: int) -> int:
    """Returns a count. Raises StartupError if the size, which the key `of` has, is not a multiple of it."""
    count = facts.count(key)
    if size % count:
        raise facts.fault(f"{facts.architecture}.{of} {size} is not a multiple of {key}, {count}")
    return count


def falcon_h1(facts: GgufFacts, config: Config) -> Config:
    """Returns Falcon-H1's entries. The converter has multiplied the weights by all multipliers."""
    if not facts.has("output.weight"):
        raise facts.unsupported(
            "the tensor 'output.weight' is missing, and falcon-h1 files do not say how logits scale"
        )
    return {
        "model_type": "falcon_h1",
        "mamba_d_ssm": facts.count("ssm.inner_size"),
        "mamba_rms_norm": facts.has_any(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp computes nothing else
        **_mixer(facts, NAMES),
    }


def granite_hybrid(facts: GgufFacts, config: Config) -> Config:
    """Returns the entries that Granite 4 with Mamba layers or experts has, and dense Granite 4 does not."""
    has_attention = facts.are_set("attention.head_count_kv", config["num_hidden_layers"])
    entries: Config = {"layer_types": ["attention" if is_set else "mamba" for is_set in has_attention]}
    if facts.get("expert_count"):
        size = facts.count("expert_shared_feed_forward_length")
        entries |= mixtral_experts(facts, config, expert_shared_feed_forward_length=None)
        entries |= {"shared_intermediate_size": size}
    if all(has_attention):
        return entries
    if facts.get("rope.scaling.finetuned") is not False:
        raise facts.unsupported(
            "granitehybrid.rope.scaling.finetuned must be false: Mamba layers beside a rope (Bamba) are not supported"
        )
    _divisor(facts, "embedding_length", "ssm.inner_size", facts.count("ssm.inner_size"))
    expand = facts.count("ssm.inner_size") // config["hidden_size"]
    return entries | {"mamba_expand": expand, **_mixer(facts, NAMES)}


def nemotron_h(facts: GgufFacts, config: Config, *, mlp: str = "mlp") -> Config:
    """Returns Nemotron-H's entries. Layers without key heads and without an mlp are Mamba's.

    mlp: the kind of layers with an inner size.
    """
    layers, size = config["num_hidden_layers"], config["head_dim"]
    if facts.count("attention.value_length", size) != size:
        raise facts.unsupported(f"{facts.architecture}.attention.value_length must be attention.key_length, {size}")
    facts.stored("rope.dimension_count")  # no layer has positions
    keys = ("attention.head_count_kv", "feed_forward_length")
    has_attention, has_mlp = (facts.are_set(key, layers) for key in keys)
    both = [layer for layer in range(layers) if has_attention[layer] and has_mlp[layer]]
    if both:
        raise facts.unsupported(f"{facts.architecture}.{keys[0]} and {keys[1]} are both set for layer {both[0]}")
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [
            "attention" if attends else mlp if feeds else "mamba"
            for attends, feeds in zip(has_attention, has_mlp, strict=True)
        ],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
        **_mixer(facts, NEMOTRON_NAMES),
    }


def nemotron_h_moe(facts: GgufFacts, config: Config) -> Config:
    """Returns Nemotron 3's entries: Nemotron-H with experts as mlps."""
    if facts.get("moe_latent_size"):
        raise facts.fault(
            "experts of latents (nemotron_h_moe.moe_latent_size), as in Nemotron 3 Super, are not supported; "
            "take Nemotron 3 Nano"
        )
    count, used = experts(facts, **NEMOTRON_EXPERTS)
    is_normalised = facts.get("expert_weights_norm") or False
    if not isinstance(is_normalised, bool):
        raise facts.fault(f"nemotron_h_moe.expert_weights_norm must be true or false, got {echo(is_normalised)}")
    groups = facts.optional_count("expert_group_count") or 1
    return {
        **nemotron_h(facts, config, mlp="moe"),
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": facts.count("expert_feed_forward_length", config["intermediate_size"]),
        "moe_shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": is_normalised,
        "routed_scaling_factor": facts.factor("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": facts.count("expert_group_used_count", 1 if groups == 1 else None),
    }
