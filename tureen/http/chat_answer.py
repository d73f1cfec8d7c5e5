"""Helpers for answers of the chat APIs: follow one output, end its stream, parse the arguments of a tool call."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request

from tureen.errors import RequestFailed
from tureen.http.dialect import client_name, prepared, unless_gone
from tureen.requests.chat import Chat, prepare
from tureen.requests.drafts import Plan
from tureen.requests.generation import WHOLE_INTERVAL, Output, OutputEvent, Run
from tureen.requests.state import ServerState
from tureen.requests.thinking_budget import BudgetedRun, BudgetedRuns, ReasoningBudget, budgeted
from tureen.text.messages import Part

ABORTED = "aborted"
ChatRun = Run | BudgetedRun | BudgetedRuns
CLOSERS = {"{": "}", "[": "]"}
MAX_ENDS = 3
"""Number of places, counted from the end, at which cut JSON is tried. If a key without a value follows the last
place, the one before it is right."""


async def prepare_chat(chat: Chat, request: Request, state: ServerState) -> Plan:
    """Makes the requests of a chat (`chat.prepare`) for the client that sent it. Raises ClientGone when the client
    leaves while pictures are loaded or a large body is read."""
    preparing = prepare(chat, state, owner=client_name(request))
    return await prepared(request, preparing, takes_time=bool(chat.pictures or chat.videos))


async def run_to_end(
    plan: Plan, request: Request, state: ServerState, budget: ReasoningBudget | None = None
) -> OutputEvent:
    """Runs a plan of one request to its end and returns its output with all its parts.

    `budget`: most tokens of reasoning, None = no limit. Raises ClientGone.
    """

    async def collected() -> OutputEvent:
        seen: list[Part] = []
        async with contextlib.aclosing(events_of(plan, state, WHOLE_INTERVAL, budget)) as events:
            async for event in events:
                seen += event.parts
        return event._replace(parts=seen)

    return await unless_gone(request, collected())


def events_of(
    plan: Plan, state: ServerState, interval: int | None = None, budget: ReasoningBudget | None = None
) -> AsyncGenerator[OutputEvent, None]:
    """Runs a plan of one request and yields its events, which may have no new parts. Closing the generator aborts it.

    `interval`: tokens between two events; `budget`: most tokens of reasoning; None = the server's, no limit.
    """
    return run_of(plan, state, budget).events(interval)


def run_of(plan: Plan, state: ServerState, budget: ReasoningBudget | None = None) -> ChatRun:
    """Returns the run of a plan. `budget`: most tokens of reasoning; None = no limit."""
    return Run(state, plan) if budget is None else budgeted(state, plan, budget)


def check_complete(output: Output) -> None:
    """Raises RequestFailed for an output that was aborted, for APIs that have no finish reason for it."""
    if output.finish is not None and output.finish.type == "abort":
        raise RequestFailed(f"the request was ended ({output.finish.reason})", code=ABORTED)


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of a tool call. Of a call that was cut off, returns the complete part."""
    for end, closers in [(len(text), ""), *_possible_ends(text)]:
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(text[:end] + closers)
            return value if isinstance(value, dict) else {}
    return {}


def _possible_ends(text: str) -> list[tuple[int, str]]:
    """Returns the places where an incomplete JSON text may be cut, the last first, each with the brackets to append."""
    unclosed: list[str] = []
    ends: deque[tuple[int, str]] = deque(maxlen=MAX_ENDS)
    is_string = is_escaped = False
    for index, char in enumerate(text):
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_string = True
        elif char in CLOSERS:
            unclosed.append(CLOSERS[char])
        elif char in "}]" and unclosed:
            unclosed.pop()
        elif char != ",":
            continue
        if not is_string and unclosed:
            ends.append((index if char == "," else index + 1, "".join(reversed(unclosed))))
    return list(reversed(ends))
