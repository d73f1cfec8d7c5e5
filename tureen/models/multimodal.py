"""Models that see: each has a text model inside, whose config is a part of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.errors import StartupError, echo


def text_config(hf: Mapping[str, Any], model_type: str, *, ties_if_text_does: bool) -> dict[str, Any]:
    """config.json's text_config; `model_type` holds where it names none.

    Which weights are tied is said outside of it; there are models that listen to both. Raises StartupError.
    """
    text = hf.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise StartupError(f"config.json: text_config: must be an object, got {echo(text)}", field="text_config")
    ties = bool(hf.get("tie_word_embeddings")) or (ties_if_text_does and bool(text.get("tie_word_embeddings")))
    return {"model_type": model_type, **text, "tie_word_embeddings": ties}
