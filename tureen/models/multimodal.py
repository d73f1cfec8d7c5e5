"""Reads configs of models that see: each has a text model inside, whose config is a part of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.errors import echo
from tureen.models.reading import fault


def text_config(hf: Mapping[str, Any], model_type: str, *, ties_if_text_does: bool) -> dict[str, Any]:
    """Returns the text model's config: config.json's text_config. Raises StartupError.

    model_type: the text model's type where text_config names none. ties_if_text_does: whether `tie_word_embeddings` of
    text_config counts too; in general only the outer one does.
    """
    text = hf.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise fault("text_config", f"must be an object, got {echo(text)}")
    ties = bool(hf.get("tie_word_embeddings")) or (ties_if_text_does and bool(text.get("tie_word_embeddings")))
    return {"model_type": model_type, **text, "tie_word_embeddings": ties}
