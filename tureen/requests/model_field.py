"""Reads the field `model` of a body: the served model, a LoRA adapter, or both."""

from __future__ import annotations

from tureen.errors import NotFound, echo
from tureen.requests.state import ServerState

ANY = ("", "default")
"""Names that mean the served model, whatever it is called."""


def adapter_of(model: str | None, state: ServerState) -> str:
    """Returns the adapter that `model` names, as NAME or MODEL:NAME; "" = the model itself. Raises NotFound."""
    served = state.context.info.model_name
    if model is None or model in (*ANY, served):
        return ""
    name = model.removeprefix(f"{served}:")
    if name in state.adapters:
        return name
    raise NotFound(
        f"the model {echo(model)} does not exist; this server has {', '.join((served, *state.adapters))}",
        field="model",
        code="model_not_found",
    )
