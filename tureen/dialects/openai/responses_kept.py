"""Serves what OpenAI's API has for responses that are kept: get, follow, cancel and delete one, list its input.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.openai.item_pages import INCLUDE, number_in, page, query_of
from tureen.dialects.openai.responses_background import BackgroundResponse
from tureen.dialects.openai.responses_keeping import NOTHING_KEPT
from tureen.errors import InvalidRequest, NotFound, echo
from tureen.http.dialect import Docs, Entry, client_name, streamed
from tureen.http.errors import error_object
from tureen.http.sse import event
from tureen.requests.state import ServerState

if TYPE_CHECKING:
    from tureen.storage.responses import ResponseStore

PATH = "/v1/responses/{response_id}"
MAX_NUMBER = 2**53 - 1
BLANK_LINE = b"\n\n"

Running = dict[tuple[str, str], BackgroundResponse]
"""Responses that are made in the background, by client and id."""

_encode = msgspec.json.Encoder().encode


def routes(state: ServerState, running: Running) -> list[Entry]:
    """Returns the routes. `running`: what is made in the background now."""

    async def get(request: Request) -> ASGIApp:
        first = _first_event(request)
        owner, name = client_name(request), request.path_params["response_id"]
        if first is None:
            return _answer(await _response(_store(state), running, owner, name))
        return await _follow(request, _store(state), running.get((owner, name)), first)

    async def delete(request: Request) -> Response:
        owner, name = client_name(request), request.path_params["response_id"]
        store = _store(state)
        await store.find(owner, name)
        if (owner, name) in running:
            await running[owner, name].cancel()
            running.pop((owner, name), None)
        await store.delete(owner, name)
        return _answer({"id": name, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        owner, name = client_name(request), request.path_params["response_id"]
        response = await _response(_store(state), running, owner, name)
        if not response["background"]:
            raise InvalidRequest(
                "only a response with background: true can be cancelled; close the connection of another one",
                field="response_id",
                code="not_in_background",
            )
        if (owner, name) in running:
            await running[owner, name].cancel()
            response = await _response(_store(state), running, owner, name)
        return _answer(response)

    async def input_items(request: Request) -> Response:
        store = _store(state)
        items = await store.items_of_request(client_name(request), request.path_params["response_id"])
        return _answer(page(items, request))

    return [
        Entry(
            PATH, get, access="user", docs=Docs("OpenAI", "Get a response that is kept.", stream="text/event-stream")
        ),
        _entry("DELETE", PATH, delete, "Delete a response."),
        _entry("POST", f"{PATH}/cancel", cancel, "Cancel a response that runs in the background."),
        _entry("GET", f"{PATH}/input_items", input_items, "List a response's input."),
    ]


def _entry(method: str, path: str, endpoint: Any, summary: str, stream: str | None = None) -> Entry:
    docs = Docs("OpenAI", summary, stream=stream)
    return Entry(path, endpoint, access="user", methods=[method], is_limited=False, docs=docs)


def _first_event(request: Request) -> int | None:
    """Returns the number of the first event that a query asks for; None where it asks for no stream. Raises
    InvalidRequest."""
    query = query_of(request, ("stream", "starting_after", "include_obfuscation", *INCLUDE))
    is_stream = query.get("stream", "false")
    if is_stream not in ("true", "false"):
        raise InvalidRequest(f"stream must be true or false, got {echo(is_stream)}", field="stream")
    after = number_in(query, "starting_after", -1, 0, MAX_NUMBER)
    if is_stream == "true":
        return after + 1
    if after >= 0:
        raise InvalidRequest("starting_after needs stream=true", field="starting_after")
    return None


def _store(state: ServerState) -> ResponseStore:
    if state.recordings.responses is None:
        raise NotFound(NOTHING_KEPT, field="response_id", code="response_not_found")
    return state.recordings.responses


async def _response(store: ResponseStore, running: Running, owner: str, name: str) -> dict[str, Any]:
    """Returns a response as it is now. Raises NotFound."""
    if (owner, name) in running:
        return running[owner, name].response
    return (await store.find(owner, name)).response


async def _follow(request: Request, store: ResponseStore, running: BackgroundResponse | None, first: int) -> ASGIApp:
    """Returns the stream of a response from event `first` on. Raises NotFound, and InvalidRequest where there is no
    such stream."""
    if running is not None and running.is_streamed:
        running.check_kept(first)
        return await streamed(request, running.follow(first), lambda error: event(_encode(error_object(error))))
    kept = await store.find(client_name(request), request.path_params["response_id"])
    if kept.events is None:
        raise InvalidRequest(
            "only a response with background: true and stream: true can be streamed again; leave stream out",
            field="stream",
            code="not_streamed",
        )
    parts = kept.events.removesuffix(BLANK_LINE).split(BLANK_LINE)
    if first >= len(parts):
        raise InvalidRequest(
            f"starting_after is at most {len(parts) - 2} for this stream: its last event has no successor",
            field="starting_after",
        )
    return await streamed(request, _again(parts[first:]), lambda error: event(_encode(error_object(error))))


async def _again(parts: list[bytes]) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part + BLANK_LINE


def _answer(content: Any) -> Response:
    return Response(_encode(content), media_type="application/json")
