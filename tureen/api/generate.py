"""`/generate`: several dialects share the path; the field that holds the prompt says which one a body speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from tureen.api import mindie, sglang, tgi
from tureen.api.body import read_json
from tureen.api.dialect import Docs, Entry
from tureen.api.mindie import MindieBody
from tureen.api.sglang_request import GenerateBody
from tureen.api.state import ServerState
from tureen.api.tgi import TgiBody
from tureen.errors import InvalidRequest

Respond = Callable[[dict[str, Any], Request, ServerState], Awaitable[ASGIApp]]

BY_PROMPT_FIELD: dict[str, Respond] = {
    "text": sglang.respond,
    "input_ids": sglang.respond,
    "input_embeds": sglang.respond,
    "prompt": mindie.respond,
    "inputs": tgi.respond,
}


def routes(state: ServerState) -> list[Entry]:
    async def generate(request: Request) -> ASGIApp:
        given = read_json(request.headers.get("content-type"), await request.body())
        found = [name for name in BY_PROMPT_FIELD if given.get(name) is not None]
        if len(found) == 1:
            return await BY_PROMPT_FIELD[found[0]](given, request, state)
        error = InvalidRequest(
            f"send exactly one of {', '.join(BY_PROMPT_FIELD)}; got {' and '.join(found) or 'none of them'}",
            field=found[-1] if found else "text",
        )
        if "prompt" in found:
            return mindie.as_mindie(error)
        raise error

    docs = Docs(
        "Generate",
        "Generate text. The field that holds the prompt says whose dialect a body speaks.",
        bodies=(GenerateBody, MindieBody, TgiBody),
        example={"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        stream="text/event-stream",
    )
    return [Entry("/generate", generate, access="user", methods=["POST", "PUT"], docs=docs)]
