"""Reads latent attention and experts from a config.json in DeepSeek's keys, and the weights of latent attention. No
torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.layers.latent import Latent
from tureen.layers.routing import Experts
from tureen.models.config import ModelConfig, checked, common
from tureen.models.reading import fault, integer, layer_number, number, refuse
from tureen.models.ropes import interleaved, rope_parameters
from tureen.weights.stored import Stored, to_float32

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by encoding."""


def with_latent(hf: Mapping[str, Any], *, is_interleaved: bool) -> ModelConfig:
    """Reads what all models with latent attention share. Raises StartupError naming the key at fault.

    is_interleaved: rotary pairs are neighbours.
    """
    refuse(hf, partial_rotary_factor=1.0)
    rope_dim = integer(hf, "qk_rope_head_dim")
    if rope_dim % 2:
        raise fault("qk_rope_head_dim", f"{rope_dim} is odd")
    heads, stored = integer(hf, "num_attention_heads"), hf.get("num_key_value_heads")
    if stored not in (None, heads):
        raise fault("num_key_value_heads", f"{echo(stored)} is not num_attention_heads, {heads}")
    config = common({**hf, "head_dim": rope_dim, "num_key_value_heads": None})
    latent = Latent(
        rank=integer(hf, "kv_lora_rank"),
        plain_dim=integer(hf, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=integer(hf, "v_head_dim"),
        query_rank=0 if hf.get("q_lora_rank") is None else integer(hf, "q_lora_rank"),
        has_bias=bool(hf.get("attention_bias", False)),
    )
    if latent.rank % 2:
        raise fault("kv_lora_rank", f"{latent.rank} is odd")
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.cached_dim,
        attention_scale=latent.query_dim**-0.5 * _stretched(hf),
        ropes=interleaved(config.ropes) if is_interleaved else config.ropes,
    )


def _stretched(hf: Mapping[str, Any]) -> float:
    """Returns the factor by which YaRN scales scores: the square of the magnitude for `mscale_all_dim` (DeepSeek)."""
    parameters = rope_parameters(hf)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    factor = number(parameters, "factor")
    return (0.1 * number(parameters, "mscale_all_dim") * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def apart(stored: Stored, config: ModelConfig) -> Iterator[Stored]:
    """Splits the matrix of keys and values, head by head, into a matrix for keys and one for values."""
    stem, _, name = stored.name.rpartition(".kv_b_proj.")
    latent, heads = config.latent, config.num_heads
    if latent is None or not stem or name != "weight":
        yield stored
        return
    height = latent.plain_dim + latent.value_dim
    if stored.shape != (heads * height, latent.rank):
        raise StartupError(
            f"weight {stored.name} has shape {list(stored.shape)}, config.json says {[heads * height, latent.rank]}; "
            "the files do not belong together"
        )
    whole = cache(lambda: stored.data.reshape(heads, height, -1))  # read once, on first use
    floats = cache(lambda: to_float32(stored).reshape(heads, height, latent.rank).view(np.uint8))
    width = WIDTHS.get(stored.encoding)
    for head in range(heads):
        yield stored._replace(
            name=f"{stem}.v_b_proj.{head}.weight",
            shape=(latent.value_dim, latent.rank),
            content=partial(_values, whole, head, latent.plain_dim),
        )
        yield stored._replace(  # block formats share scales within a row, so they are widened before the transposition
            name=f"{stem}.k_b_proj.{head}.weight",
            shape=(latent.rank, latent.plain_dim),
            encoding="F32" if width is None else stored.encoding,
            content=partial(_keys, floats if width is None else whole, head, latent.plain_dim, width or 4),
        )


def _values(whole: Callable[[], NDArray[np.uint8]], head: int, first: int) -> NDArray[np.uint8]:
    return whole()[head, first:].reshape(-1)


def _keys(whole: Callable[[], NDArray[np.uint8]], head: int, end: int, width: int) -> NDArray[np.uint8]:
    """Returns the bytes of a head's keys, transposed. width: bytes of a number."""
    own = whole()[head, :end]
    return np.ascontiguousarray(own.reshape(end, -1, width).swapaxes(0, 1)).reshape(-1)


def experts_v3(hf: Mapping[str, Any]) -> Experts:
    """Reads experts that are chosen by sigmoids with a correction (arXiv:2408.15664)."""
    refuse(hf, topk_method="noaux_tc", scoring_func="sigmoid")
    return checked(
        replace(
            routed(hf),
            score="sigmoid",
            has_correction=True,
            is_normalised=bool(hf.get("norm_topk_prob", True)),
            num_groups=integer(hf, "n_group", 1),
            num_chosen_groups=integer(hf, "topk_group", 1),
        )
    )


def routed(hf: Mapping[str, Any]) -> Experts:
    """Reads experts that are chosen by softmax."""
    size = integer(hf, "moe_intermediate_size")
    return Experts(
        count=integer(hf, "n_routed_experts"),
        num_chosen=integer(hf, "num_experts_per_tok"),
        size=size,
        is_normalised=False,
        shared_size=size * layer_number(hf, "n_shared_experts", 0),
        has_shared_gate=False,
        factor=number(hf, "routed_scaling_factor", 1.0),
    )
