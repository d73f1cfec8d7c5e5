"""What the APIs of chats have in common where they answer: follow one output, end its stream, read what a call says."""

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
from tureen.requests.thinking_budget import events_within
from tureen.text.messages import Part

ABORTED = "aborted"
CLOSERS = {"{": "}", "[": "]"}
MAX_ENDS = 3
"""The last place but one where a value ends is right: behind the last there may be a key without its value."""


async def planned(chat: Chat, request: Request, state: ServerState) -> Plan:
    """`prepare` for the client that asks; ends when it leaves while that takes time."""
    preparing = prepare(chat, state, owner=client_name(request))
    return await prepared(request, preparing, takes_time=bool(chat.pictures or chat.videos))


async def whole(plan: Plan, request: Request, state: ServerState, budget: int | None = None) -> OutputEvent:
    """The one output of a plan, with all its parts. `budget`: tokens to think with. Raises ClientGone."""

    async def collected() -> OutputEvent:
        seen: list[Part] = []
        async with contextlib.aclosing(events_of(plan, state, WHOLE_INTERVAL, budget)) as events:
            async for event in events:
                seen += event.parts
        return event._replace(parts=seen)

    return await unless_gone(request, collected())


def events_of(
    plan: Plan, state: ServerState, interval: int | None = None, budget: int | None = None
) -> AsyncGenerator[OutputEvent, None]:
    """The events of a plan of one request, also where there is nothing new to tell. Closing it ends the request."""
    return Run(state, plan).events(interval) if budget is None else events_within(plan, budget, state, interval)


def check_complete(output: Output) -> None:
    """Raises RequestFailed for an output that was ended from outside: for APIs whose answers cannot say so."""
    if output.finish is not None and output.finish.type == "abort":
        raise RequestFailed(f"the request was ended ({output.finish.reason})", code=ABORTED)


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments; of a call that was cut short, what is complete in them."""
    for end, closers in [(len(text), ""), *_possible_ends(text)]:
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(text[:end] + closers)
            return value if isinstance(value, dict) else {}
    return {}


def _possible_ends(text: str) -> list[tuple[int, str]]:
    """Where a JSON text might end, and what would close it there; the last places first."""
    open_ones: list[str] = []
    found: deque[tuple[int, str]] = deque(maxlen=MAX_ENDS)
    is_string = is_escaped = False
    for index, char in enumerate(text):
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_string = True
        elif char in CLOSERS:
            open_ones.append(CLOSERS[char])
        elif char in "}]" and open_ones:
            open_ones.pop()
        elif char != ",":
            continue
        if not is_string and open_ones:
            found.append((index if char == "," else index + 1, "".join(reversed(open_ones))))
    return list(reversed(found))
