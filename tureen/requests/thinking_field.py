"""Translates fields about reasoning, whether and how much a model thinks, into variables of its chat template."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.requests.state import Context
from tureen.text.messages import Tool

VARIABLES = ("enable_thinking", "thinking")
"""Variables with which chat templates turn reasoning on and off."""

EFFORT = "reasoning_effort"
"""Variable with OpenAI's reasoning effort in chat templates."""


NOT_THINKING = "this model does not think before it answers"
"""Why a field about reasoning has no effect."""

NEAR = 0.8
"""Minimum similarity at which a name counts as a typing error of another."""


def thinking_kwargs(enable: bool, field: str, tools: Sequence[Tool], context: Context) -> dict[str, bool]:
    """Return the chat template's variable that turns reasoning on or off, with its value; {} if it has none.

    A request to think is reported as ignored if the model does not think: the answer has no reasoning, which every API
    allows. Raises InvalidRequest for a request not to think if the model thinks all the same.
    """
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; rendering the prompt raises the reason
    for name in VARIABLES:
        if name in templates.of(tools).variables:
            return {name: enable}
    thinks = context.reasoning_format is not None
    if enable and not thinks:
        ignored.tell(field, NOT_THINKING)
    if thinks and not enable:
        raise InvalidRequest(
            f"{field}: this model always thinks, because its chat template cannot turn reasoning off; leave the field "
            "out, or serve a model that can switch reasoning",
            field=field,
        )
    return {}


def knows_effort(tools: Sequence[Tool], context: Context) -> bool:
    """Returns whether the chat template uses a reasoning effort."""
    templates = context.chat_templates
    return not isinstance(templates, str) and EFFORT in templates.of(tools).variables


def effort_kwargs(effort: str, field: str, tools: Sequence[Tool], context: Context) -> dict[str, str | bool]:
    """Returns the chat template's variable for the reasoning effort, with its value. Reports a level that the template
    does not know as ignored. Raises InvalidRequest for `none` if the model thinks regardless."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return {}  # no chat is possible; rendering the prompt raises the reason
    if EFFORT in templates.of(tools).variables:
        return {EFFORT: effort}
    if effort == "none":
        return dict(thinking_kwargs(False, field, tools, context))
    ignored.tell(field, "this model's chat template has no reasoning levels")
    return {}


def known_kwargs(kwargs: Mapping[str, Any], field: str, tools: Sequence[Tool], context: Context) -> dict[str, Any]:
    """Returns the variables that the chat template knows, and names close to a known one, which rendering refuses.
    Reports other variables as ignored."""
    templates = context.chat_templates
    if isinstance(templates, str):
        return dict(kwargs)  # no chat is possible; rendering the prompt raises the reason
    known, kept = templates.of(tools).variables, {}
    for name, value in kwargs.items():
        if name in known or name == "chat_template" or difflib.get_close_matches(name[:64], known, n=1, cutoff=NEAR):
            kept[name] = value
        elif value is not None:
            ignored.tell(f"{field}.{name}", "this model's chat template does not have this variable", is_declared=False)
    return kept
