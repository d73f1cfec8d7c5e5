"""Passes a client's call from one front to another, over a private unix socket: the call's head, the
pieces of its body as they come, and the answer's back. Whoever leaves closes the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tureen.errors import Unavailable
from tureen.http.call import SCOPE_KEY, ClientCall, call_of, error_response_for
from tureen.log import get_logger
from tureen.sandbox.framing import HEADER, framed

START, BODY, END = b"s", b"b", b"e"
UNREAD_BYTES = 1 << 16

log = get_logger("fronts")


class CallHead(msgspec.Struct, frozen=True, array_like=True):
    """A call as it came, and who sent it, as the first front knows."""

    method: str
    scheme: str
    http_version: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    client_name: str  # of its TLS certificate
    request_id: str


class AnswerHead(msgspec.Struct, frozen=True, array_like=True):
    """Status and headers of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


async def pass_on(path: str, scope: Scope, receive: Receive, send: Send, seen: Sequence[Message] = ()) -> None:
    """Has the front at the socket `path` answer a call. `seen`: messages of it that were received already."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        await _say_gone(scope, receive, send)
        return
    call = call_of(scope)
    fields: dict[str, Any] = {name: scope.get(name) for name in CallHead.__struct_fields__}
    fields |= {"headers": list(scope["headers"]), "client_name": call.client_name, "request_id": call.request_id}
    fields["raw_path"] = scope.get("raw_path") or b""
    sending = asyncio.create_task(_send_body(writer, msgspec.msgpack.encode(CallHead(**fields)), receive, seen))
    try:
        is_whole, has_begun = await _pass_back(reader, send)
        if is_whole or (sending.done() and sending.result()):
            return
        if has_begun:
            raise ConnectionAbortedError("the front that answers is gone")
        await _say_gone(scope, receive, send)
    finally:
        sending.cancel()
        writer.close()
        await asyncio.gather(sending, return_exceptions=True)


async def _say_gone(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unavailable("the front that holds this is gone; try again", code="front_gone", retry_after_s=1)
    await error_response_for(error, scope)(scope, receive, send)


async def _send_body(writer: asyncio.StreamWriter, head: bytes, receive: Receive, seen: Sequence[Message]) -> bool:
    """Sends head and body. Closes the connection when the client leaves, and returns True; returns False when the
    other front does."""
    unread = list(reversed(seen))
    writer.write(framed(head))
    with contextlib.suppress(ConnectionError):
        while True:
            message = unread.pop() if unread else await receive()
            if message["type"] == "http.disconnect":
                writer.close()
                return True
            writer.write(framed(BODY + message.get("body", b"")))
            if not message.get("more_body", False):
                writer.write(framed(END))
            await writer.drain()
    return False


async def _pass_back(reader: asyncio.StreamReader, send: Send) -> tuple[bool, bool]:
    """Sends the client what comes back. Returns whether it came to its end, and whether it began."""
    has_begun = False
    while True:
        frame = await _frame(reader)
        if not frame:
            return False, has_begun
        has_begun = True
        kind, payload = frame[:1], frame[1:]
        if kind == START:
            head = msgspec.msgpack.decode(payload, type=AnswerHead)
            await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        else:
            await send({"type": "http.response.body", "body": payload, "more_body": kind != END})
        if kind == END:
            return True, True


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Returns the next frame; b"" when the other side has left."""
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def answer_passed(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a call that another front has passed on, as if its client had come here."""
    try:
        frame = await _frame(reader)
        if frame:
            await _answer(app, msgspec.msgpack.decode(frame, type=CallHead), reader, writer)
    except ConnectionError:
        pass  # its client has left
    except Exception:  # an edge: this call fails, others go on
        log.exception("a forwarded call failed")
    finally:
        writer.close()


async def _answer(app: ASGIApp, head: CallHead, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    reading = asyncio.Lock()
    call = ClientCall(request_id=head.request_id, client_name=head.client_name)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        **{
            name: getattr(head, name)
            for name in CallHead.__struct_fields__
            if name not in ("client_name", "request_id")
        },
        "root_path": "",
        SCOPE_KEY: call,
    }

    async def receive() -> Message:
        async with reading:
            frame = await _frame(reader)
        if not frame:
            return {"type": "http.disconnect"}
        if frame == END:
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.request", "body": frame[1:], "more_body": True}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent = AnswerHead(message["status"], list(message.get("headers", ())))
            writer.write(framed(START + msgspec.msgpack.encode(sent)))
        else:
            kind = BODY if message.get("more_body", False) else END
            writer.write(framed(kind + message.get("body", b"")))
        await writer.drain()

    await app(scope, receive, send)
    async with reading:  # not before the last who waits for the client to leave
        while await reader.read(UNREAD_BYTES):
            pass  # of a body that was not needed: closing the connection before would break off the answer, too
