"""Reads the rotary scaling of a GGUF file as config.json would have it under rope_scaling.

Source: llama.cpp's src/llama-model.cpp and src/llama-context.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tureen.errors import echo
from tureen.weights.gguf_facts import GgufFacts

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_TOLERANCE: Final = 1e-3
KINDS: Final = ("none", "linear", "yarn", "longrope")
"""Known values of rope.scaling.type."""


def rope_scaling(facts: GgufFacts, rotated: int) -> dict[str, Any] | None:
    """Returns the scaling of the `rotated` dimensions of a head; None if frequencies are as rope_theta gives them.

    Raises StartupError.
    """
    kind = facts.get("rope.scaling.type")
    factor = _factor(facts)
    if kind is None and factor is not None:
        kind = "linear"
    if kind not in (None, *KINDS):
        raise facts.fault(
            f"{facts.architecture}.rope.scaling.type {echo(kind)} is not supported; these are: {', '.join(KINDS)}"
        )
    if facts.has(ROPE_FACTORS) and kind in ("yarn", "longrope"):
        raise facts.unsupported(f"rotary scaling of two kinds, {kind} and tensor '{ROPE_FACTORS}', is not supported")
    if kind == "longrope" or facts.has(LONG_FACTORS) or facts.has(SHORT_FACTORS):
        return _longrope_scaling(facts, rotated)
    if facts.has(ROPE_FACTORS):
        return _llama3_scaling(facts, rotated)
    if kind in (None, "none"):
        return None
    factor = facts.number("rope.scaling.factor") if factor is None else factor
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn_scaling(facts, factor)


def with_sections(facts: GgufFacts, config: Mapping[str, Any], pairs: int, *, alternate: bool) -> dict[str, Any]:
    """Returns the scaling in `config`, and how many of a head's pairs turn with a token's frame, row and column.

    pairs: that a head has. alternate: they turn with each in turn. Raises StartupError.
    """
    key = "rope.dimension_sections"
    stored = facts.stored(key)
    counts = stored.tolist() if isinstance(stored, np.ndarray) and stored.dtype.kind in "iu" else []
    if len(counts) not in (3, 4) or min(counts) < 0 or any(counts[3:]) or sum(counts) != pairs:
        raise facts.fault(
            f"{facts.architecture}.{key} must be three counts that add up to {pairs}, and perhaps a 0; got "
            f"{counts[:8] or echo(stored)}"
        )
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {**scaling, "mrope_section": counts[:3], "mrope_interleaved": alternate}


def _factor(facts: GgufFacts) -> float | None:
    """Returns the factor of the context, under its newer or its older key; None without one. 0 means that, too."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if facts.get(key) not in (None, 0):
            return facts.number(key)
    return None


def _longrope_scaling(facts: GgufFacts, rotated: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": numbers(facts, LONG_FACTORS, rotated // 2).tolist(),
        "short_factor": numbers(facts, SHORT_FACTORS, rotated // 2).tolist(),
        "original_max_position_embeddings": facts.count(
            "rope.scaling.original_context_length", facts.count("context_length")
        ),
        "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
    }


def numbers(facts: GgufFacts, name: str, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns a tensor of float32 numbers. Raises StartupError for another type or number."""
    tensor = facts.file.tensors.get(name)
    if tensor is None or tensor.encoding.name != "F32" or tensor.shape != (count,):
        raise facts.fault(f"tensor '{name}' must be {count} float32 numbers")
    return facts.file.raw(tensor).view("<f4").astype(np.float64)


def _yarn_scaling(facts: GgufFacts, factor: float) -> dict[str, Any]:
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0  # as transformers scales attention by default
    for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        value = facts.number(f"rope.scaling.{key}", 1.0)
        if value != 1 and not (key == "attn_factor" and math.isclose(value, usual, rel_tol=1e-4)):
            raise facts.unsupported(f"{facts.architecture}.rope.scaling.{key} must be 1, got {value}")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.count(
            "rope.scaling.original_context_length", facts.count("context_length")
        ),
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if facts.get("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": facts.number("rope.scaling.yarn_log_multiplier")}
    return scaling


def _llama3_scaling(facts: GgufFacts, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's rope scaling. The file stores a divisor per frequency, which one formula made; its factor
    varies."""
    stored = numbers(facts, ROPE_FACTORS, head_dim // 2)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(facts.number("rope.freq_base", 10000.0), head_dim, scaling)
    if not np.allclose(stored, expected, rtol=ROPE_TOLERANCE):
        raise facts.unsupported(
            f"tensor '{ROPE_FACTORS}' is a rotary scaling other than Llama 3's, which is not supported"
        )
    return scaling


def llama3_divisors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the divisors of the head_dim/2 rotary frequencies (Llama 3.1): 1 for short waves, `factor` for long
    ones."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))
