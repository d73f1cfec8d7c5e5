"""Reads the field `model` of a body: the served model, a LoRA adapter, or both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from tureen.contract.types import EngineInfo, ModelKind
from tureen.errors import InvalidRequest, NotFound, echo
from tureen.fields import ignored
from tureen.requests.state import ServerState

ANY = ("", "default", "tgi", "dummy")
"""Names that mean the served model, whatever its name: ours, and those that clients of TGI and SGLang send."""

LATEST = "latest"
"""Tag that Ollama's clients append to the name of a model."""

FORMAT = re.compile(r"[.:-](?:i?q\d\w*|b?f16|f32)$")
"""The end of the name of a GGUF file or model, in lower case: the format of its weights."""


class ModelNames(NamedTuple):
    """The names of one model and its adapters."""

    name: str
    paths: tuple[str, ...]  # where it was loaded from
    adapters: Mapping[str, str]
    files: tuple[str, ...] = ()  # the names of its GGUF files

    def is_served(self, model: str) -> bool:
        """Returns whether a name means the model: its name or its file's name, in any case, with or without
        organisation and weight format, or the place that it was loaded from."""
        names = [_last_part(name) for name in (self.name, *self.files)]
        return model in (self.name, *self.paths) or _last_part(model) in (*names, *(FORMAT.sub("", n) for n in names))

    def adapter(self, model: str) -> str | None:
        """Returns the adapter that `model` names, as NAME or MODEL:NAME; "" = the model itself, None = neither."""
        if self.is_served(model):
            return ""
        if model in self.adapters:
            return model
        name, _, tag = model.rpartition(":")
        if tag in self.adapters and self._is_served_or_default(name):
            return tag
        if tag == LATEST and name in self.adapters:
            return name
        return "" if name and tag == LATEST and self._is_served_or_default(name) else None

    def _is_served_or_default(self, model: str) -> bool:
        return model in ANY or self.is_served(model)


def names_of(state: ServerState) -> ModelNames:
    """Returns the names that mean the model of a state."""
    info = state.context.info
    files = tuple(name for name, *_ in info.files if name.endswith(".gguf") and not name.startswith("mmproj"))
    return ModelNames(info.model_name, (info.model_path, state.context.config.model_path), state.adapters, files)


def adapter_of(model: str | None, state: ServerState) -> str:
    """Returns the adapter that `model` names, as NAME or MODEL:NAME; "" = the model itself.

    A server of one model accepts any name and reports it as ignored. Raises NotFound if the server has adapters or
    several models, or was started with --strict-model-names.
    """
    if model is None or is_served(model, state):
        return ""
    adapter = names_of(state).adapter(model)
    if adapter is not None:
        return adapter
    served, models = state.context.info.model_name, state.common.models
    is_strict = bool(state.adapters or models or state.context.config.strict_model_names)
    name = model.rpartition(":")[0]
    if name and is_served(name, state) and not is_strict:
        return ""
    if is_strict:
        raise unknown_model(model, [served, *state.adapters] if models is None else models.names())
    ignored.tell("model", f"this server has one model, {served}, which accepts any name")
    return ""


def unknown_model(model: str, names: Iterable[str]) -> NotFound:
    """Returns the error for a name that means no model. `names`: the known names."""
    return NotFound(
        f"the model {echo(model)} does not exist; this server has {', '.join(names)}",
        field="model",
        code="model_not_found",
    )


def is_served(model: str, state: ServerState) -> bool:
    """Returns whether a name means the served model: see ModelNames.is_served; or a name that means any model."""
    return model in ANY or names_of(state).is_served(model)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold().removesuffix(".gguf")


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
