"""Qwen3-VL (arXiv:2511.21631), dense and with experts: Qwen3 with pictures, of which the first layers get more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tureen.errors import StartupError
from tureen.layers.routing import Experts
from tureen.media import qwen_vl
from tureen.media.qwen_vision import QwenVision, qwen3_vision
from tureen.models.config import ModelConfig, checked, common, sparse_layers, with_sections
from tureen.models.published import Published
from tureen.models.reading import fault, integer
from tureen.weights.stored import Stored

ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
FAMILIES = {
    "Qwen3-VL": Published(
        "Qwen/Qwen3-VL-2B-Instruct", "2.1B, 4.4B, 8.8B, 33B, 30B-A3B, 235B-A22B", calls="hermes", thoughts="qwen3"
    ),
}
DENSE = {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500000.0}
SPARSE = {"num_key_value_heads": 16, "rope_theta": 500000.0}
"""Published configs leave out keys that have these values."""
SECTIONS = (24, 20, 20)


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    has_experts = hf.get("model_type") == "qwen3_vl_moe_text"
    hf = {**(SPARSE if has_experts else DENSE), **hf}
    config = with_sections(common(hf), hf, SECTIONS, alternate=True)
    bias, num_deep = bool(hf.get("attention_bias", False)), len(qwen3_vision(hf, is_deep=True).deep_layers)
    if num_deep > config.num_layers:
        raise fault("deepstack_visual_indexes", f"has {num_deep} layers, but the text model has {config.num_layers}")
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        num_deep_inputs=num_deep,
        experts=_experts(hf, config.num_layers) if has_experts else (),
    )


def parse_vision(hf: Mapping[str, Any]) -> QwenVision:
    """Reads the vision part of config.json. Raises StartupError naming the key that is wrong or not supported."""
    return qwen_vl.vision_config(hf)


def _experts(hf: Mapping[str, Any], num_layers: int) -> tuple[Experts | None, ...]:
    experts = Experts(
        count=integer(hf, "num_experts", integer(hf, "num_local_experts", 60)),  # transformers writes either
        num_chosen=integer(hf, "num_experts_per_tok", 4),
        size=integer(hf, "moe_intermediate_size", 1408),
        is_normalised=True,
    )
    return sparse_layers(hf, num_layers, checked(experts))


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields the weight. Published files have the inputs of experts before their outputs: those are turned."""
    part = stored.name.partition(".mlp.experts.")[2].removesuffix(".weight")
    if "scale" in part and not part[0].isdigit():
        raise StartupError(
            f"{stored.name}: experts in one quantised tensor cannot be read; take the BF16 checkpoint with "
            "--quantization int4 or int8",
            field="model_path",
        )
    hidden_at = {"gate_up_proj": 2, "down_proj": 1}.get(part)
    if hidden_at is None or len(stored.shape) != 3 or stored.shape[hidden_at] == config.hidden_size:
        yield stored
        return
    experts, inputs, outputs = stored.shape
    yield stored._replace(shape=(experts, outputs, inputs), content=partial(_turned, stored))


def _turned(stored: Stored) -> NDArray[np.uint8]:
    by_output: NDArray[np.uint8] = np.ascontiguousarray(stored.data.reshape(*stored.shape, -1).swapaxes(1, 2))
    return by_output.reshape(-1)
