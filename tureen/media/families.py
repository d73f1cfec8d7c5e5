"""Finds the family of multi-modal models that a checkpoint belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tureen import extras
from tureen.config import Config
from tureen.errors import StartupError
from tureen.media.base import Family
from tureen.registry import declared, declaring
from tureen.sandbox.supervisor import why_no_helpers


def is_family(hf: Mapping[str, Any]) -> bool:
    """Returns whether the model of a config.json takes pictures, if what they need is installed."""
    model_type = hf.get("model_type")
    is_text = hf.get("vision_config") is None and _declares("VISION_IS_OPTIONAL", model_type)
    return _declares("MODEL_TYPES", model_type) and not is_text


def _declares(name: str, model_type: object) -> bool:
    return declaring("tureen.media", name, model_type) is not None


def sees(hf: Mapping[str, Any], config: Config) -> bool:
    """Returns whether the model takes pictures here."""
    return is_family(hf) and not config.language_model_only and why_blind() is None


def why_blind() -> str | None:
    """Returns why models that see take text only here; None if they take pictures."""
    return why_no_helpers() or None if extras.is_installed("PIL") else extras.why_missing("PIL")


def find_family(hf: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Family:
    """Returns the family for config.json and preprocessor_config.json. Raises StartupError naming what is known, or a
    key at fault."""
    known = declared("tureen.media", "MODEL_TYPES")
    model_type = str(hf.get("model_type", ""))
    if model_type not in known:
        raise StartupError(
            f"config.json: model_type {model_type or '(none)'} takes no pictures; these do: {', '.join(sorted(known))}"
        )
    family: Family = importlib.import_module(known[model_type]).parse(hf, preprocessor)
    return family
