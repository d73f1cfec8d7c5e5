"""Lets clients repeat a request (`Idempotency-Key`) and resume an event stream whose connection was lost.

It is middleware between the gate and the dialects, which do not know about it. A repeated request gets the bytes of the
first answer. Sources: IETF draft httpapi-idempotency-key-header; HTML standard, server-sent events (Last-Event-ID).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tureen.clients.quotas import ClientWork
from tureen.errors import InvalidRequest, TureenError
from tureen.http.call import SCOPE_KEY, call_of, error_response_for
from tureen.http.dialect import ClientGone, Docs, Entry, unless_gone
from tureen.http.sse import StreamedResponse, event
from tureen.recordings.recording import Recording
from tureen.requests.state import ServerState

KEY_HEADER = b"idempotency-key"
MAX_KEY_CHARS = 255
KEY = re.compile(f"[!-~]{{1,{MAX_KEY_CHARS}}}")
REPLAYED = (b"idempotent-replayed", b"true")


def routes(state: ServerState) -> list[Entry]:
    """Returns the route that resumes a stream."""

    async def events(request: Request) -> ASGIApp:
        recording = state.recordings.stream(
            call_of(request.scope).client_id(request.scope), request.path_params["name"]
        )
        return RecordedResponse(recording, recording.after(request.headers.get("last-event-id")))

    docs = Docs(
        "Generate",
        "Resume an event stream whose connection was lost, from the event after Last-Event-ID.",
        stream="text/event-stream",
        headers={"Last-Event-ID": "The id of the last event received. Default: resume from the first event."},
    )
    return [Entry("/generate/{name:path}/events", events, access="user", docs=docs)]


class RecordedResponse:
    """A response read from a recording, from part `number` on."""

    def __init__(self, recording: Recording, number: int = 0, *, is_repeat: bool = False) -> None:
        self._recording = recording
        self._number = number
        self._is_repeat = is_repeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._recording.listening():
            head = await unless_gone(Request(scope, receive), self._recording.started())
            if self._is_repeat:
                head = {**head, "headers": [*head["headers"], REPLAYED]}
            await StreamedResponse(head, self._parts(scope))(scope, receive, send)

    async def _parts(self, scope: Scope) -> AsyncGenerator[bytes, None]:
        """Yields the parts of the recording. An error becomes the last event of a stream. An answer that is not a
        stream cannot report it, so raises ConnectionAbortedError."""
        try:
            async with contextlib.aclosing(self._recording.follow(self._number)) as parts:
                async for part in parts:
                    yield part
        except TureenError as error:
            if not self._recording.is_stream:
                raise ConnectionAbortedError(error.message) from None
            yield b"event: error\n" + event(bytes(error_response_for(error, scope).body))


class Replay:
    """ASGI middleware that runs a request independently of its connection if the client may fetch the answer later."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._recordings = state.recordings
        self._keeps_streams = state.context.config.resume_grace_s > 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = idempotency_key(scope) if scope["type"] == "http" else None
        may_be_kept = scope["type"] == "http" and (key is not None or self._keeps_streams)
        work = call_of(scope).work if may_be_kept else None
        if key is not None and work is None:
            raise InvalidRequest(
                "Idempotency-Key has no effect here: it is for requests that generate or compute; leave it out",
                field="Idempotency-Key",
                code="not_available",
            )
        if work is None:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is not None:
            with contextlib.suppress(ClientGone):
                await self._response(key, body, work, scope)(scope, receive, send)

    def _response(self, key: str | None, body: bytes, work: ClientWork, scope: Scope) -> RecordedResponse:
        """Returns the response to a request: from an earlier recording with the same key, else from a new one. Raises
        Unprocessable, Conflict."""
        call = call_of(scope)
        owner, identity = call.client_id(scope), None
        if key is not None:
            identity = key, _fingerprint(scope, body)
            earlier = self._recordings.repeated(owner, *identity)
            if earlier is not None:
                return RecordedResponse(earlier, is_repeat=True)
        recording = self._recordings.new(call.request_id, owner, work, identity)
        recording.start(self._make(scope, body, recording), self._recordings.ended)
        return RecordedResponse(recording)

    async def _make(self, scope: Scope, body: bytes, recording: Recording) -> None:
        """Runs the app and records its answer. The app sees a disconnect when the recording is abandoned."""
        inner = {**scope, SCOPE_KEY: call_of(scope).sent_by(recording.send)}
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await recording.is_abandoned.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(inner, receive, recording.send)
        except TureenError as error:
            await error_response_for(error, inner)(inner, receive, recording.send)


def idempotency_key(scope: Scope) -> str | None:
    """Returns the header's value, None without one. Raises InvalidRequest."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == KEY_HEADER]
    if not values:
        return None
    key: str = values[0].strip(" \t")
    if len(values) > 1 or KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"Idempotency-Key must be sent once, with 1 to {MAX_KEY_CHARS} printable ASCII characters, no spaces",
            field="Idempotency-Key",
            code="invalid_idempotency_key",
        )
    return key


async def _read(receive: Receive) -> bytes | None:
    """Reads the whole body. Returns None if the client leaves meanwhile."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    """Returns a hash of method, path, query and body, which is equal for equal requests."""
    parts = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).digest()
