"""Maps the names of the vision weights of LLaVA and Mistral 3 in checkpoints to those used here. No torch."""

from __future__ import annotations

import re
from typing import Final

PREFIXES: Final = ("model.", "vision_tower.", "vision_tower.", "vision_model.")
"""Prefixes that are left out, in this order, where a name begins so: older and newer checkpoints differ in them."""
LAYER: Final = re.compile(r"(?:encoder|transformer)\.layers?\.(\d+)\.(.+)")
UNUSED: Final = ("post_layernorm.", "layernorm.", "head.", "embeddings.mask_token", "embeddings.position_ids")
"""Weights that come after the features, or are for training."""
NAMES: Final = {
    "image_newline": "newline",
    "multi_modal_projector.linear_1": "projector.fc1",
    "mm_projector.0": "projector.fc1",
    "mm_projector.2": "projector.fc2",
    "multi_modal_projector.linear_2": "projector.fc2",
    "multi_modal_projector.norm": "merger.norm",
    "multi_modal_projector.patch_merger.merging_layer": "merger",
    "embeddings.class_embedding": "tower.class_token",
    "embeddings.cls_token": "tower.class_token",
    "embeddings.patch_embedding": "tower.patches",
    "embeddings.patch_embeddings.projection": "tower.patches",
    "embeddings.position_embedding.weight": "tower.positions",
    "embeddings.position_embeddings": "tower.positions",
    "pre_layrnorm": "tower.input_norm",
    "patch_conv": "tower.patches",
    "ln_pre": "tower.input_norm",
}
LAYER_NAMES: Final = {
    "layer_norm1": "norm1",
    "norm1": "norm1",
    "layer_norm2": "norm2",
    "norm2": "norm2",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "attention.attention.query": "q",
    "attention.attention.key": "k",
    "attention.attention.value": "v",
    "attention.output.dense": "out",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
    "mlp.weights_in": "fc1",
    "mlp.weights_out": "fc2",
    "attention_norm": "norm1",
    "ffn_norm": "norm2",
    "attention.q_proj": "q",
    "attention.k_proj": "k",
    "attention.v_proj": "v",
    "attention.o_proj": "out",
    "feed_forward.gate_proj": "gate",
    "feed_forward.up_proj": "fc1",
    "feed_forward.down_proj": "fc2",
    "layer_scale1.lambda1": "scale1",
    "layer_scale2.lambda1": "scale2",
}


def short_name(name: str) -> str:
    """Returns a checkpoint's name without the prefixes that differ from one checkpoint to another."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def local_name(name: str, num_layers: int) -> str | None:
    """Returns the name used here; None for weights that a tower of `num_layers` layers does not use.

    Raises KeyError for an unknown name.
    """
    name = short_name(name)
    match = LAYER.fullmatch(name)
    if match is not None:
        is_used = int(match[1]) < num_layers
        return f"tower.layers.{int(match[1])}.{_renamed(match[2], LAYER_NAMES)}" if is_used else None
    return None if name.startswith(UNUSED) else _renamed(name, NAMES)


def _renamed(name: str, names: dict[str, str]) -> str:
    if name in names:
        return names[name]
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        raise KeyError(name)
    return f"{names[module]}.{kind}"
