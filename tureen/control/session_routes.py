"""Serves SGLang's `/open_session` and `/close_session`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest, echo
from tureen.http.dialect import Docs, Entry, client_name
from tureen.requests.body import convert, read_json, refuse_unknown
from tureen.requests.state import ServerState

MAX_NAME_CHARS = 256


class OpenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /open_session`."""

    capacity_of_str_len: Annotated[
        int,
        Meta(ge=1, le=2**53, description="Most characters that a prompt may have, with all that it continues."),
    ]
    session_id: Annotated[
        str | None, Meta(description="Name of the session, 1 to 256 printable ASCII characters. Default: random.")
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Seconds without use after which it is closed.")
    ] = None
    streaming: Annotated[bool, Meta(description="Not available: true is refused.")] = False


class CloseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /close_session`."""

    session_id: Annotated[str, Meta(description="Name of the session.")]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def open_session(request: Request) -> Response:
        fields = await _read(request, OpenBody, "capacity_of_str_len")
        body = convert(fields, OpenBody)
        if body.streaming:
            raise InvalidRequest(
                "streaming: true is not available in this version of tureen; leave it out, "
                "the prefix cache spares the same work",
                field="streaming",
                code="not_available",
            )
        name = body.session_id
        if name is not None and not (1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()):
            raise InvalidRequest(
                f"session_id must be 1 to {MAX_NAME_CHARS} printable ASCII characters, got {echo(name)}",
                field="session_id",
            )
        owner = client_name(request)
        opened = state.sessions.open(body.capacity_of_str_len, owner=owner, name=name, timeout_s=body.timeout)
        return JSONResponse(opened)

    async def close_session(request: Request) -> Response:
        body = convert(await _read(request, CloseBody, "session_id"), CloseBody)
        state.sessions.close(body.session_id, owner=client_name(request))
        return Response()

    return [
        Entry(
            "/open_session",
            open_session,
            access="user",
            methods=["GET", "POST"],
            docs=Docs("Sessions", "Open one.", bodies=(OpenBody,), example={"capacity_of_str_len": 4000}),
        ),
        Entry(
            "/close_session",
            close_session,
            access="user",
            methods=["GET", "POST"],
            is_limited=False,
            docs=Docs(
                "Sessions", "Close one.", bodies=(CloseBody,), example={"session_id": "mine"}, answer="text/plain"
            ),
        ),
    ]


async def _read(request: Request, kind: type[msgspec.Struct], required: str) -> dict[str, Any]:
    """Returns the body's fields that are not null. Raises InvalidRequest, UnsupportedMediaType."""
    payload = read_json(request.headers.get("content-type"), await request.body())
    refuse_unknown(payload, kind.__struct_fields__)
    fields = {name: value for name, value in payload.items() if value is not None}
    if required not in fields:
        raise InvalidRequest(f"{required} is missing; it must be sent", field=required)
    return fields
