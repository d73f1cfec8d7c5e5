"""Reads the ropes of a config.json: how positions turn queries and keys. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tureen.errors import echo
from tureen.layers.rope import RopeConfig
from tureen.models.reading import fault, integer, number

ROPE_KINDS = ("default", "linear", "llama3", "longrope", "yarn", "proportional")


def rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rope's settings, by their newer or their older name; {} where there are none."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = hf.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise fault(key, f"must be an object, got {echo(parameters)}")
    return parameters


def rope(hf: Mapping[str, Any], parameters: Mapping[str, Any], *, theta: float | None = None) -> RopeConfig:
    """Reads a rope's settings. Raises StartupError naming the key at fault.

    parameters: the config's rope_parameters or, in older ones, rope_scaling beside rope_theta. theta: the base
    frequency that holds instead of the config's.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # older Qwen files, which also have mrope_section
    if kind not in ROPE_KINDS:
        raise fault("rope_scaling", f"{echo(kind)} is not supported; known: {', '.join(ROPE_KINDS)}")
    share = number({**hf, **parameters}, "partial_rotary_factor", 1.0)
    if share > 1:
        raise fault("partial_rotary_factor", f"must be at most 1, got {share:g}")
    base = number({"rope_theta": theta or hf.get("rope_theta"), **parameters}, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(base, share=share)
    if kind == "proportional":
        if parameters.get("factor", 1.0) != 1.0:
            raise fault("rope_parameters.factor", f"must be 1 with proportional, got {echo(parameters['factor'])}")
        return RopeConfig(base, kind, share=share)
    if kind == "linear":
        return RopeConfig(base, kind, share=share, factor=number(parameters, "factor"))
    if kind == "longrope":
        return _longrope(hf, parameters, base, share)
    if kind == "yarn":
        return _yarn(hf, parameters, base, share)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if low >= high:
        raise fault("low_freq_factor", f"must be less than high_freq_factor; got {low:g} and {high:g}")
    return RopeConfig(
        base,
        kind,
        share=share,
        factor=number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=integer(parameters, "original_max_position_embeddings"),
    )


def interleaved(ropes: tuple[RopeConfig | None, ...]) -> tuple[RopeConfig | None, ...]:
    """Returns the same ropes for neighbouring pairs."""
    return tuple(None if rope is None else replace(rope, is_interleaved=True) for rope in ropes)


def sections(hf: Mapping[str, Any], pairs: int, default: tuple[int, int, int], *, alternate: bool) -> tuple[int, ...]:
    """Reads how many pairs of dimensions turn with a token's frame, row and column. Raises StartupError.

    pairs: of a head's dimensions that turn; alternate: they turn with the three in turn, not one after another.
    """
    parameters = rope_parameters(hf)
    if parameters.get("mrope_interleaved", alternate) != alternate:
        raise fault("mrope_interleaved", f"only {str(alternate).lower()} is supported for this model")
    counts = parameters.get("mrope_section") or list(default)
    are_counts = isinstance(counts, list) and len(counts) == 3 and all(type(count) is int for count in counts)
    if not are_counts or min(counts) < 0 or sum(counts) != pairs:
        raise fault("mrope_section", f"must be three numbers that add up to {pairs}, got {echo(counts)}")
    return tuple(counts)


def without_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without the settings of its ropes, which `ropes_of_windows` reads."""
    return {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling")}


def ropes_of_windows(
    hf: Mapping[str, Any], windows: tuple[int | None, ...], *, local_theta: float, full_theta: float
) -> tuple[RopeConfig, ...]:
    """Returns a rope for each layer: one for layers with a window, another for those without.

    Settings hold for layers without a window, unless the config has them for each kind of layer.
    """
    parameters = rope_parameters(hf)
    local: Mapping[str, Any] = {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local = rope_parameters({"rope_parameters": parameters.get("sliding_attention")})
        parameters = rope_parameters({"rope_parameters": parameters.get("full_attention")})
    own, full = rope({}, local, theta=local_theta), rope(hf, parameters, theta=full_theta)
    return tuple(full if window is None else own for window in windows)


def _longrope(hf: Mapping[str, Any], parameters: Mapping[str, Any], base: float, share: float) -> RopeConfig:
    num_heads = integer(hf, "num_attention_heads")
    dim = int(integer(hf, "head_dim", integer(hf, "hidden_size") // num_heads) * share)
    key = "original_max_position_embeddings"
    original = integer({key: hf.get(key) or parameters.get(key)}, key)
    if original < 2:
        raise fault(key, f"must be at least 2, got {original}")
    stretch = number(parameters, "factor", integer(hf, "max_position_embeddings") / original)
    grown = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeConfig(
        base,
        "longrope",
        share=share,
        original_context=original,
        short_factors=_factors(parameters, "short_factor", dim // 2),
        long_factors=_factors(parameters, "long_factor", dim // 2),
        magnitude=number(parameters, "attention_factor", grown),
    )


def _yarn(hf: Mapping[str, Any], parameters: Mapping[str, Any], base: float, share: float) -> RopeConfig:
    if base <= 1:
        raise fault("rope_theta", f"must be more than 1 with yarn, got {base:g}")
    key = "original_max_position_embeddings"
    original = integer({key: hf.get(key) or parameters.get(key) or hf.get("max_position_embeddings")}, key)
    factor = number(parameters, "factor", integer(hf, "max_position_embeddings", original) / original)
    fast, slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)
    if fast < slow:
        raise fault("beta_fast", f"must be at least beta_slow; got {fast:g} and {slow:g}")
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise fault("truncate", f"must be true or false, got {echo(truncate)}")
    return RopeConfig(
        base,
        "yarn",
        share=share,
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        magnitude=number(parameters, "attention_factor", _yarn_magnitude(parameters, factor)),
    )


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Returns the factor of rotated vectors where the config names none (arXiv:2309.00071, section 3.4)."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return grown(1.0)
    return grown(number(parameters, "mscale")) / grown(number(parameters, "mscale_all_dim"))


def _factors(parameters: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != length:
        raise fault(f"rope_scaling.{key}", f"must be a list of {length} numbers")
    return tuple(number({key: value}, key) for value in values)
