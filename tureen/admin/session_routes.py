"""Serves SGLang's `/open_session` and `/close_session`, and what our sessions can besides: be kept, listed, copied."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest, TureenError, echo
from tureen.fields.body import convert, read_json, refuse_unknown
from tureen.http.call import call_of
from tureen.http.dialect import Docs, Entry, client_name
from tureen.requests.state import ServerState
from tureen.sessions.sessions import Sessions, fork, save, unsave
from tureen.sessions.tree import Keeper, Session

MAX_NAME_CHARS = 256
PATH = "/sessions/{name:path}"

Name = Annotated[
    str | None, Meta(description="Name of the session, 1 to 256 printable ASCII characters. Default: random.")
]
Timeout = Annotated[
    Annotated[float, Meta(gt=0)] | None, Meta(description="Idle seconds after which the session is closed.")
]


class OpenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /open_session`."""

    capacity_of_str_len: Annotated[
        int,
        Meta(ge=1, le=2**53, description="Most characters of a prompt, including everything that it continues."),
    ]
    session_id: Name = None
    timeout: Timeout = None
    durable: Annotated[bool, Meta(description="Keep the session across restarts, in --sessions-db.")] = False
    streaming: Annotated[bool, Meta(description="Not available: true is refused.")] = False


class CloseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /close_session`."""

    session_id: Annotated[str, Meta(description="Name of the session.")]


class SaveBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /save_session`."""

    session_id: Annotated[str, Meta(description="Name of the session.")]
    timeout: Timeout = None


class ForkBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /fork_session`."""

    session_id: Annotated[str, Meta(description="Name of the session.")]
    rid: Annotated[str | None, Meta(description="Copy only this request and what it continues.")] = None
    new_session_id: Name = None
    timeout: Timeout = None
    durable: Annotated[bool | None, Meta(description="Keep the copy, too. Default: if the session is kept.")] = None


class SessionCalls:
    """Answers calls about a model's sessions. What they change of durable ones is on the disk before they answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._saving = asyncio.Lock()  # one save must not answer for another, which may fail

    @property
    def _sessions(self) -> Sessions:
        return self._state.sessions

    async def open(self, request: Request) -> Response:
        body = convert(await _read(request, OpenBody, "capacity_of_str_len"), OpenBody)
        if body.streaming:
            raise InvalidRequest(
                "streaming: true is not available in this version of tureen; leave it out, "
                "the prefix cache saves the same work",
                field="streaming",
                code="not_available",
            )
        _check_name(body.session_id, "session_id")
        owner, keeper = client_name(request), self._keeper("durable") if body.durable else None
        name = self._sessions.open(
            body.capacity_of_str_len, owner=owner, name=body.session_id, timeout_s=body.timeout, keeper=keeper
        )
        return await self._answer_with(name, owner)

    async def close(self, request: Request) -> Response:
        body = convert(await _read(request, CloseBody, "session_id"), CloseBody)
        await self._sessions.saved(self._sessions.close(body.session_id, owner=client_name(request)))
        return Response()

    async def save(self, request: Request) -> Response:
        body = convert(await _read(request, SaveBody, "session_id"), SaveBody)
        keeper = self._keeper("session_id")
        owner = client_name(request)
        async with self._saving:
            session = self._sessions.find(owner, body.session_id)
            was_durable, timeout_s = session.keeper is not None, session.timeout_s
            save(self._sessions, body.session_id, keeper, owner=owner, timeout_s=body.timeout)
            try:
                await self._sessions.saved(session)
            except TureenError:
                if not was_durable:
                    unsave(self._sessions, session, timeout_s)
                raise
        return Response()

    async def fork(self, request: Request) -> Response:
        body = convert(await _read(request, ForkBody, "session_id"), ForkBody)
        _check_name(body.new_session_id, "new_session_id")
        owner = client_name(request)
        is_durable = body.durable
        if is_durable is None:
            is_durable = self._sessions.find(owner, body.session_id).keeper is not None
        name = fork(
            self._sessions,
            body.session_id,
            owner=owner,
            new_name=body.new_session_id,
            rid=body.rid,
            timeout_s=body.timeout,
            keeper=self._keeper("durable") if is_durable else None,
        )
        return await self._answer_with(name, owner)

    async def list(self, request: Request) -> Response:
        owner, refusal = client_name(request), call_of(request.scope).admin_refusal
        if not owner and refusal is not None:  # of those who have no name, whoever knows an id may use the session
            raise refusal
        return JSONResponse({"sessions": [self._report(session) for session in self._sessions.of(owner)]})

    async def show(self, request: Request) -> Response:
        owner, name = client_name(request), request.path_params["name"]
        if request.method == "DELETE":
            await self._sessions.saved(self._sessions.close(name, owner=owner))
            return JSONResponse({"session_id": name, "deleted": True})
        session = self._sessions.find(owner, name)
        requests = [
            {
                "rid": node.rid,
                "continues": None if node.parent is None else node.parent.rid,
                "prompt_tokens": node.num_prompt,
                "kept_tokens": node.base,
                "completion_tokens": len(node.output_ids),
                "running": node.is_running,
            }
            for node in session.nodes.values()
        ]
        return JSONResponse(self._report(session) | {"requests": requests})

    def _keeper(self, field: str) -> Keeper:
        """Raises InvalidRequest where no sessions are kept."""
        keeper = self._sessions.keeper
        if keeper is None:
            raise InvalidRequest(
                "this server keeps no sessions across restarts; start it with --sessions-db FILE, or leave durable out",
                field=field,
                code="not_available",
            )
        return keeper

    async def _answer_with(self, name: str, owner: str) -> Response:
        """Answers with the name of a new session once it is kept; one that cannot be kept is closed again."""
        try:
            await self._sessions.saved(self._sessions.find(owner, name))
        except TureenError:
            self._sessions.close(name, owner=owner)
            raise
        return JSONResponse(name)

    def _report(self, session: Session) -> dict[str, Any]:
        nodes = session.nodes.values()
        report: dict[str, Any] = {
            "session_id": session.name,
            "durable": session.keeper is not None,
            "capacity_of_str_len": session.capacity,
            "timeout": session.timeout_s,
            "expires_in": round(session.used_s + session.timeout_s - self._sessions.now_s, 3),
            "num_requests": len(nodes),
            "num_tokens": sum(node.num_held for node in nodes),
        }
        if session.keeper is not None:
            report |= session.keeper.report(session)
        return report


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""
    calls, name = SessionCalls(state), {"session_id": "mine"}
    plain = "text/plain"
    both = ["GET", "POST"]
    opening = Docs("Sessions", "Open one.", bodies=(OpenBody,), example={"capacity_of_str_len": 4000})
    closing = Docs("Sessions", "Close one.", bodies=(CloseBody,), example=name, answer=plain)
    saving = Docs("Sessions", "Keep a session across restarts.", bodies=(SaveBody,), example=name, answer=plain)
    forking = Docs("Sessions", "Copy a session, or one branch of it.", bodies=(ForkBody,), example=name)
    listing = Docs("Sessions", "List your own sessions.")
    showing = Docs("Sessions", "Show a session with its requests; DELETE closes it.")
    return [
        Entry("/open_session", calls.open, access="user", methods=both, docs=opening),
        Entry("/close_session", calls.close, access="user", methods=both, is_limited=False, docs=closing),
        Entry("/save_session", calls.save, access="user", methods=["POST"], is_limited=False, docs=saving),
        Entry("/fork_session", calls.fork, access="user", methods=["POST"], is_limited=False, docs=forking),
        Entry("/sessions", calls.list, access="user", docs=listing),
        Entry(PATH, calls.show, access="user", methods=["GET", "DELETE"], docs=showing),
    ]


def _check_name(name: str | None, field: str) -> None:
    """Raises InvalidRequest."""
    if name is not None and not (1 <= len(name) <= MAX_NAME_CHARS and name.isascii() and name.isprintable()):
        raise InvalidRequest(
            f"{field} must be 1 to {MAX_NAME_CHARS} printable ASCII characters, got {echo(name)}", field=field
        )


async def _read(request: Request, kind: type[msgspec.Struct], required: str) -> dict[str, Any]:
    """Returns the body's fields that are not null. Raises InvalidRequest, UnsupportedMediaType."""
    payload = read_json(request.headers.get("content-type"), await request.body())
    refuse_unknown(payload, kind.__struct_fields__)
    fields = {name: value for name, value in payload.items() if value is not None}
    if required not in fields:
        raise InvalidRequest(f"{required} is missing; it must be sent", field=required)
    return fields
