"""Refuses requests that the model's kind cannot answer, and names the routes that work."""

from __future__ import annotations

from typing import Final

from tureen.contract.types import EngineInfo, ModelKind
from tureen.errors import InvalidRequest

ABOUT: Final[dict[ModelKind, str]] = {
    "generator": "this model generates text; use /v1/chat/completions, /v1/completions or /generate, or /v1/score for "
    "probabilities of tokens",
    "embedder": "this is an embedding model, which generates no text; use /v1/embeddings, /v1/rerank or /encode",
    "classifier": "this is a scoring model, which generates no text; use /v1/rerank, /v1/score or /classify",
}
CODES: Final[dict[ModelKind, str]] = {
    "generator": "not_a_generation_model",
    "embedder": "not_an_embedding_model",
    "classifier": "not_a_classification_model",
}


def check_kind(info: EngineInfo, *kinds: ModelKind) -> None:
    """Raises InvalidRequest unless the model is of a wanted kind. The first one decides the error's code."""
    if info.kind not in kinds:
        raise InvalidRequest(ABOUT[info.kind], code=CODES[kinds[0]])
