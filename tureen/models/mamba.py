"""Reads the settings of recurrent layers, which several families have. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tureen.errors import echo
from tureen.layers.mixers import Mamba2
from tureen.models.reading import fault, integer, number, refuse

MOST_TOKENS = 9  # of a convolution
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""Names that configs give the kinds of layers -> our names."""


def mamba2(hf: Mapping[str, Any], size: int | None = None) -> Mamba2:
    """Reads the keys mamba_*. Raises StartupError naming the key at fault.

    size: of all heads; None = mamba_expand times hidden_size.
    """
    refuse(hf, hidden_act="silu")
    if size is None:
        size = int(number(hf, "mamba_expand", 2) * integer(hf, "hidden_size"))
    num_heads = integer(hf, "mamba_n_heads", 128)
    is_auto = hf.get("mamba_d_head") == "auto"
    head_dim = integer({} if is_auto else hf, "mamba_d_head", max(1, size // num_heads))
    if num_heads * head_dim != size:
        raise fault("mamba_n_heads", f"{num_heads} times mamba_d_head {head_dim} is not {size}, the size of all heads")
    return checked_mamba(
        Mamba2(
            num_heads=num_heads,
            head_dim=head_dim,
            state_dim=integer(hf, "mamba_d_state", 256),
            num_groups=integer(hf, "mamba_n_groups", 1),
            kernel=kernel(hf, "mamba_d_conv", 4),
            conv_bias=has(hf, "mamba_conv_bias", default=True),
            in_bias=has(hf, "mamba_proj_bias", default=False),
            out_bias=has(hf, "mamba_proj_bias", default=False),
            step_limits=step_limits(hf),
        ),
        groups="mamba_n_groups",
    )


def kernel(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads the number of tokens of a convolution. Raises StartupError."""
    tokens = integer(hf, key, default)
    if tokens > MOST_TOKENS:
        raise fault(key, f"must be at most {MOST_TOKENS} tokens, got {tokens}")
    return tokens


def checked_mamba(mixer: Mamba2, *, groups: str) -> Mamba2:
    """Returns the mixer. Raises StartupError if heads cannot be divided evenly among groups.

    groups: the config's key for their number.
    """
    if mixer.num_heads % mixer.num_groups:
        raise fault(groups, f"{mixer.num_heads} heads cannot be divided evenly among {mixer.num_groups} groups")
    return mixer


def step_limits(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Reads time_step_limit, the least and the largest time step of a token. Raises StartupError."""
    value = hf.get("time_step_limit")
    limits = [_finite_or_not(limit) for limit in value] if isinstance(value, (list, tuple)) else None
    if value is None:
        return 0.0, math.inf
    if limits is None or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:  # NaN fails each comparison
        raise fault("time_step_limit", f"must be the least and the largest time step, got {echo(value)}")
    return limits[0], limits[1]


def has(hf: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Reads a switch; a missing or null key takes the default."""
    value = hf.get(key)
    return default if value is None else bool(value)


def _finite_or_not(value: object) -> float:
    """Returns a number, which transformers 5 writes as an object if it is infinite; NaN for anything else."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]
