"""Serves SGLang's routes that count which experts of a mixture model the tokens use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tureen.admin.profile_routes import EmptyBody
from tureen.http.dialect import Docs, Entry, read_body
from tureen.requests.state import ServerState

Handler = Callable[[Request], Awaitable[Response]]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes: begin to count, end it, take the counts."""

    async def start(request: Request) -> Response:
        await read_body(request, EmptyBody)
        await state.client.call("start_expert_record")
        return PlainTextResponse("Start recording expert distribution.\n")

    async def stop(request: Request) -> Response:
        await read_body(request, EmptyBody)
        await state.client.call("stop_expert_record")
        return PlainTextResponse("Stop recording expert distribution.\n")

    async def dump(request: Request) -> Response:
        await read_body(request, EmptyBody)
        layers = cast("list[tuple[int, list[int]]]", await state.client.call("take_expert_record"))
        return JSONResponse({"layers": [{"layer_id": layer, "counts": counts} for layer, counts in layers]})

    def entry(verb: str, handler: Handler, about: str, answer: str) -> Entry:
        docs = Docs("Control", about, answer=answer)
        return Entry(f"/{verb}_expert_distribution_record", handler, access="admin", methods=["GET", "POST"], docs=docs)

    return [
        entry("start", start, "Count the tokens that each expert takes.", "text/plain"),
        entry("stop", stop, "End that.", "text/plain"),
        entry("dump", dump, "Take the counts, by layer and expert.", "application/json"),
    ]
