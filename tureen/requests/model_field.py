"""Reads the field `model` of a body: the served model, a LoRA adapter, or both."""

from __future__ import annotations

from tureen.errors import NotFound, echo
from tureen.requests import telling
from tureen.requests.state import ServerState

ANY = ("", "default", "tgi", "dummy")
"""Names that mean the served model, whatever it is called: ours, and those that clients of TGI and of SGLang send."""

LATEST = "latest"
"""Tag that Ollama's clients put behind the name of a model."""


def adapter_of(model: str | None, state: ServerState) -> str:
    """Returns the adapter that `model` names, as NAME or MODEL:NAME; "" = the model itself.

    A server of one model answers to any name, and tells that it did. Raises NotFound where it has adapters, or was
    started with --strict-model-names.
    """
    if model is None or is_served(model, state):
        return ""
    if model in state.adapters:
        return model
    name, _, tag = model.rpartition(":")
    if tag in state.adapters and is_served(name, state):
        return tag
    if tag == LATEST and name in state.adapters:
        return name
    served, is_strict = state.context.info.model_name, state.context.config.strict_model_names
    if name and is_served(name, state) and (tag == LATEST or not (state.adapters or is_strict)):
        return ""
    if state.adapters or is_strict:
        raise NotFound(
            f"the model {echo(model)} does not exist; this server has {', '.join((served, *state.adapters))}",
            field="model",
            code="model_not_found",
        )
    telling.tell("model", f"this server has one model, {served}, which answers to any name")
    return ""


def is_served(model: str, state: ServerState) -> bool:
    """Returns whether a name means the served model: its name, in any case and with the organisation in front; or
    where it was loaded from."""
    info = state.context.info
    return model in (*ANY, info.model_name, info.model_path, state.context.config.model_path) or _last_part(
        model
    ) == _last_part(info.model_name)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold().removesuffix(".gguf")
