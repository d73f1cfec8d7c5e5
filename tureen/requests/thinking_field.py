"""Translates fields about reasoning, whether and how much a model thinks, into variables of its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.errors import InvalidRequest
from tureen.requests import telling
from tureen.requests.state import Context
from tureen.text.messages import Tool

VARIABLES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""

EFFORT = "reasoning_effort"
"""Variable by which chat templates take OpenAI's reasoning effort."""


def thinking_kwargs(enable: bool, field: str, tools: Sequence[Tool], context: Context) -> dict[str, bool]:
    """Returns the chat template's variable that turns reasoning on or off, with its value; {} when the model already
    does as asked. Raises InvalidRequest when it does not and its template has no such variable."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; rendering the prompt raises the reason
    for name in VARIABLES:
        if name in templates.of(tools).variables:
            return {name: enable}
    thinks = context.reasoning_format is not None
    if enable and not thinks:
        raise InvalidRequest(f"{field}: this model does not think before it answers; leave it out", field=field)
    if thinks and not enable:
        raise InvalidRequest(
            f"{field}: this model's chat template cannot tell it not to think; leave it out", field=field
        )
    return {}


def knows_effort(tools: Sequence[Tool], context: Context) -> bool:
    """Says whether the chat template takes a reasoning effort."""
    templates = context.chat_templates
    return not isinstance(templates, str) and EFFORT in templates.of(tools).variables


def effort_kwargs(effort: str, field: str, tools: Sequence[Tool], context: Context) -> dict[str, str | bool]:
    """Returns the chat template's variable for the reasoning effort, with its value; a level that the template does
    not know is told. Raises InvalidRequest for none where the model thinks all the same."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; rendering the prompt raises the reason
    if EFFORT in templates.of(tools).variables:
        return {EFFORT: effort}
    if effort == "none":
        return dict(thinking_kwargs(False, field, tools, context))
    telling.tell(field, "this model's chat template knows no levels of reasoning")
    return {}
