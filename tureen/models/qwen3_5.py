"""Qwen3.5 and 3.6, dense and with experts, and Qwen3-Next: three layers in four have a gated delta rule.

Source: arXiv:2412.06464 for the rule; the checkpoints of Qwen3-Next keep its matrices head by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from tureen.layers.mixers import GatedDelta
from tureen.layers.routing import Experts
from tureen.media import qwen_vl
from tureen.media.qwen_vision import QwenVision
from tureen.models.config import ModelConfig, checked, common, sparse_layers, with_sections
from tureen.models.mamba import kernel
from tureen.models.published import Published
from tureen.models.reading import fault, integer, layer_kinds
from tureen.weights.stored import Stored

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
FAMILIES = {
    "Qwen3-Next": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "80B-A3B", calls="hermes", thoughts="qwen3", is_blind=True
    ),
    "Qwen3.5, Qwen3.6": Published(
        "Qwen/Qwen3.5-0.8B", "0.8B, 2B, 4B, 9B, 27B, 35B-A3B", calls="qwen3_coder", thoughts="qwen3"
    ),
}
SECTIONS = (11, 11, 10)
FULL_EVERY = 4  # layers, unless the config says otherwise
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Published configs leave out keys that have these values."""


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {**DEFAULTS, **hf}
    has_experts = hf.get("num_experts") not in (None, 0)
    size = hf.get("intermediate_size") or hf.get("moe_intermediate_size")
    config = common({**hf, "intermediate_size": size})
    if hf.get("vision_config"):
        config = with_sections(config, hf, SECTIONS, alternate=True)
    mixer = _mixer(hf)
    is_linear = _linear_layers(hf, config.num_layers)
    bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        unit_offset_norm=True,
        has_gate=True,
        mixers=tuple(mixer if linear else None for linear in is_linear),
        ropes=tuple(None if linear else rope for linear, rope in zip(is_linear, config.ropes, strict=True)),
        experts=_experts(hf, config.num_layers) if has_experts else (),
    )


def parse_vision(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return qwen_vl.vision_config(hf)


def _mixer(hf: Mapping[str, Any]) -> GatedDelta:
    heads, groups = integer(hf, "linear_num_value_heads"), integer(hf, "linear_num_key_heads")
    if heads % groups:
        raise fault("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads, {groups}")
    return GatedDelta(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=integer(hf, "linear_key_head_dim"),
        value_dim=integer(hf, "linear_value_head_dim"),
        kernel=kernel(hf, "linear_conv_kernel_dim"),
        is_apart=bool(hf.get("linear_value_heads_apart", False)),
    )


def _linear_layers(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns for each layer whether it has a gated delta rule in place of attention."""
    every = integer(hf, "full_attention_interval", FULL_EVERY)
    usual = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)]
    kinds = layer_kinds(hf, num_layers, ("linear_attention", "full_attention"), usual)
    return [kind == "linear_attention" for kind in kinds]


def _experts(hf: Mapping[str, Any], num_layers: int) -> tuple[Experts | None, ...]:
    experts = Experts(
        count=integer(hf, "num_experts"),
        num_chosen=integer(hf, "num_experts_per_tok", 10),
        size=integer(hf, "moe_intermediate_size", 512),
        is_normalised=bool(hf.get("norm_topk_prob", True)),
        shared_size=integer(hf, "shared_expert_intermediate_size", 512),
    )
    return sparse_layers(hf, num_layers, checked(experts))


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields the parts of matrices that the file keeps head by head: of q_proj queries and gates; of Qwen3-Next's
    in_proj_qkvz and in_proj_ba queries, keys, values and gates."""
    stem, _, name = stored.name.rpartition(".self_attn.q_proj.")
    if stem:
        yield from _split(stored, config.num_heads, {
            f"{stem}.self_attn.q_proj.{name}": config.head_dim,
            f"{stem}.self_attn.gate_proj.{name}": config.head_dim,
        })  # fmt: skip
        return
    stem, _, name = stored.name.rpartition(".linear_attn.in_proj_")
    mixer = next((mixer for mixer in config.mixers if isinstance(mixer, GatedDelta)), None)
    if mixer is None or name not in ("qkvz.weight", "ba.weight"):
        yield stored
        return
    stem = f"{stem}.linear_attn.in_proj_"
    each = mixer.num_value_heads // mixer.num_key_heads
    if name == "ba.weight":
        yield from _split(stored, mixer.num_key_heads, {f"{stem}b.weight": each, f"{stem}a.weight": each})
        return
    sizes = {"q": mixer.key_dim, "k": mixer.key_dim, "v": each * mixer.value_dim, "z": each * mixer.value_dim}
    rows = _rows(mixer.num_key_heads, list(sizes.values()))
    qkv = np.concatenate(rows[:3])
    yield stored._replace(name=f"{stem}qkv.weight", shape=(len(qkv), *stored.shape[1:]), row_order=qkv)
    yield stored._replace(name=f"{stem}z.weight", shape=(len(rows[3]), *stored.shape[1:]), row_order=rows[3])


def _split(stored: Stored, num_heads: int, sizes: Mapping[str, int]) -> Iterator[Stored]:
    """Yields parts of a matrix that keeps, head by head, sizes[name] rows of each part."""
    for (name, _), rows in zip(sizes.items(), _rows(num_heads, list(sizes.values())), strict=True):
        yield stored._replace(name=name, shape=(len(rows), *stored.shape[1:]), row_order=rows)


def _rows(num_heads: int, sizes: list[int]) -> list[np.ndarray]:
    """Returns the rows of each part, if each head has `sizes` rows of the parts in turn."""
    starts = np.cumsum([0, *sizes])
    heads = np.arange(num_heads)[:, None] * starts[-1]
    return [(heads + np.arange(start, end)).reshape(-1) for start, end in pairwise(starts)]
