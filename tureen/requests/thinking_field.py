"""The fields that say whether a model thinks before it answers, and how much."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.errors import InvalidRequest
from tureen.requests.state import Context
from tureen.text.messages import Tool

VARIABLES = ("enable_thinking", "thinking")
"""What chat templates call it."""

EFFORT = "reasoning_effort"


def thinking_kwargs(wanted: bool, field: str, tools: Sequence[Tool], context: Context) -> dict[str, bool]:
    """What tells the model's chat template so. Raises InvalidRequest where the model cannot be told and would not do
    so anyway."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; who makes the prompt says why
    for name in VARIABLES:
        if name in templates.of(tools).variables:
            return {name: wanted}
    thinks = context.reasoning_format is not None
    if wanted and not thinks:
        raise InvalidRequest(f"{field}: this model does not think before it answers; leave it out", field=field)
    if thinks and not wanted:
        raise InvalidRequest(
            f"{field}: this model's chat template cannot tell it not to think; leave it out", field=field
        )
    return {}


def effort_kwargs(effort: str, field: str, tools: Sequence[Tool], context: Context) -> dict[str, str | bool]:
    """What tells the model's chat template how much to think. Raises InvalidRequest where it cannot."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; who makes the prompt says why
    if EFFORT in templates.of(tools).variables:
        return {EFFORT: effort}
    if effort == "none":
        return dict(thinking_kwargs(False, field, tools, context))
    raise InvalidRequest(f"{field}: this model's chat template knows no levels but none; leave it out", field=field)
