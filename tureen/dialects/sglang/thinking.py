"""Reads SGLang's fields about reasoning: an output begins with it, a constraint waits for its end, a budget ends it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tureen.contract.params import CONSTRAINTS
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.requests.drafts import Plan
from tureen.requests.output_parser import Reading
from tureen.requests.state import Context
from tureen.requests.thinking_field import NOT_THINKING

BUDGET = "max_thinking_tokens"


class ThinkingBody(Protocol):
    """The fields of a body that are about reasoning, or cannot go with it."""

    @property
    def require_reasoning(self) -> bool: ...
    @property
    def max_thinking_tokens(self) -> int | None: ...
    @property
    def session_params(self) -> Any: ...


def after_reasoning(fields: dict[str, Any], body: ThinkingBody, where: str, context: Context) -> dict[str, Any]:
    """Returns the sampling parameters of an output that begins with reasoning, as the body asks.

    `where`: the body's name for the parameters. A model that does not think gets them unchanged, and the field is
    reported as ignored. Raises InvalidRequest.
    """
    field = BUDGET if body.max_thinking_tokens else "require_reasoning"
    form = context.reasoning_format
    if form is None:
        for name in ("require_reasoning", BUDGET):
            if getattr(body, name):
                ignored.tell(name, NOT_THINKING)
        return fields
    if body.max_thinking_tokens and body.session_params is not None:
        raise InvalidRequest(f"{field} cannot go with session_params; send the whole prompt", field=field)
    special = {"skip_special_tokens": False} if form.is_special else {}
    if all(fields.get(name) is None for name in CONSTRAINTS):
        return special | fields
    if fields.get("grammar_after"):
        raise InvalidRequest(
            f"{where}.grammar_after cannot go with {field}, which says where the constraint begins; send one",
            field=f"{where}.grammar_after",
        )
    return special | fields | {"grammar_after": form.end + form.answer}


def thinking(plan: Plan, context: Context) -> Plan:
    """Returns the plan of requests whose outputs begin within the reasoning, which stays in their text."""
    reading = Reading(reasoning=context.reasoning_format, separate_reasoning=False, starts_inside=True)
    return msgspec.structs.replace(plan, reading=reading)
