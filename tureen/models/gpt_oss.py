"""gpt-oss (arXiv:2508.10925): experts with biases and a clamped SwiGLU; a sink in each head; windows in every other
layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tureen.layers.activation_names import SWIGLU_ALPHA, SWIGLU_LIMIT
from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common, sliding_windows
from tureen.models.published import Published
from tureen.models.reading import integer, refuse
from tureen.weights.stored import Stored

ARCHITECTURES = ("GptOssForCausalLM",)
FAMILIES = {
    "gpt-oss": Published("openai/gpt-oss-20b", "21B-A4B, 117B-A5B", calls="gpt-oss", thoughts="gpt-oss"),
}
RENAMES = ((".mlp.router.", ".mlp.gate."),)
"""Parts of a checkpoint's names -> our names."""

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json. Raises StartupError naming the key that is missing, wrong or not supported."""
    hf = {"rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150_000.0, **hf}
    refuse(hf, swiglu_alpha=SWIGLU_ALPHA, swiglu_limit=SWIGLU_LIMIT, hidden_act="silu")
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = YARN
    config = common(hf)
    slides = [layer % 2 == 0 for layer in range(config.num_layers)]
    experts = Experts(
        count=integer(hf, "num_local_experts", integer(hf, "num_experts", 128)),
        num_chosen=integer(hf, "num_experts_per_tok", integer(hf, "experts_per_token", 4)),
        size=config.intermediate_size,
        is_normalised=True,
        has_bias=True,
    )
    bias = bool(hf.get("attention_bias", True))
    return replace(
        config,
        activation="clamped_swiglu",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        has_sinks=True,
        windows=sliding_windows({"sliding_window": 128, **hf}, config.num_layers, slides),
        experts=(checked(experts),) * config.num_layers,
    )


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Yields the weights of each expert, which safetensors keep in one tensor, with rows of gate and up in turn.

    Matrices are [experts, inputs, outputs], those in MXFP4 [experts, outputs, inputs]; biases are [experts, outputs].
    """
    stem, _, name = stored.name.rpartition(".mlp.experts.")
    if not stem or name[0].isdigit():
        yield stored
        return
    part, is_bias, is_turned = name.removesuffix("_bias").removesuffix(".weight"), name.endswith("_bias"), "." in name
    shape = stored.shape[1:] if is_turned else stored.shape[:0:-1]
    whole = cache(lambda: stored.data.reshape(stored.shape[0], -1))  # read once, on first use
    kind = "bias" if is_bias else "weight"
    for expert in range(stored.shape[0]):
        content = partial(_rows, whole, expert, None if is_turned or is_bias else stored.shape[1:])
        own = stored._replace(shape=shape, content=content)
        if part != "gate_up_proj":
            yield own._replace(name=f"{stem}.mlp.experts.{expert}.{part}.{kind}")
            continue
        for place, half in enumerate(("gate_proj", "up_proj")):
            order = np.arange(place, shape[0], 2)
            half_name = f"{stem}.mlp.experts.{expert}.{half}.{kind}"
            yield own._replace(name=half_name, shape=(len(order), *shape[1:]), row_order=order)


def _rows(
    whole: Callable[[], NDArray[np.uint8]], expert: int, turned_from: tuple[int, ...] | None
) -> NDArray[np.uint8]:
    """Returns an expert's bytes, a row for each output. turned_from: inputs and outputs, if inputs are the rows."""
    own: NDArray[np.uint8] = whole()[expert]
    if turned_from is None:
        return own
    by_output: NDArray[np.uint8] = np.ascontiguousarray(own.reshape(*turned_from, -1).swapaxes(0, 1))
    return by_output.reshape(-1)
