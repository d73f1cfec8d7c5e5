"""Reads the settings of a config.json, each checked and with its name in the error. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from tureen.errors import StartupError, echo

LARGEST: Final = (1 << 31) - 1
"""The largest accepted integer."""
MOST: Final = {
    "max_position_embeddings": 1 << 30,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "moe_num_experts": 4096,
    "n_routed_experts": 4096,
    "num_experts": 4096,
    "num_hidden_layers": 4096,
    "num_local_experts": 4096,
}
"""The largest accepted values of keys with a lower limit. Memory grows with these before any weight is compared."""


def integer(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads a count of at least 1. A missing or null key takes the default, if there is one. Raises StartupError."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise fault(key, "is missing" if value is None else f"must be a positive integer, got {echo(value)}")
    if value > MOST.get(key, LARGEST):
        raise fault(key, f"must be at most {MOST.get(key, LARGEST)}, got {echo(value)}")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Reads a key like `integer`, for any positive number."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise fault(key, "is missing" if value is None else f"must be a positive number, got {echo(value)}")
    return float(value)


def layer_number(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Reads a key like `integer`, for any integer that is not negative."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise fault(key, f"must be an integer from 0 to {LARGEST}, got {echo(value)}")
    return value


def optional_number(hf: Mapping[str, Any], key: str) -> float | None:
    """Reads a key like `number`; None where the key is missing or null."""
    return None if hf.get(key) is None else number(hf, key)


def layer_kinds(hf: Mapping[str, Any], num_layers: int, known: tuple[str, ...], default: list[str]) -> list[str]:
    """Reads layer_types, the kind of each layer. A missing or null key takes the default."""
    kinds = hf.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        allowed = " or ".join(known)
        raise fault("layer_types", f"must say {allowed} for each of {num_layers} layers, got {echo(kinds)}")
    return kinds


def refuse(hf: Mapping[str, Any], **allowed: object) -> None:
    """Raises StartupError for a key whose value is present, not null, and other than the one allowed."""
    for key, value in allowed.items():
        if hf.get(key) not in (None, value):
            raise fault(key, f"{echo(hf[key])} is not supported; only {echo(value)} is")


def fault(key: str, what: str) -> StartupError:
    """Returns the error for a key of config.json."""
    return StartupError(f"config.json: {key}: {what}", field=key)
