"""Extends uvicorn's HTTP/1.1 connection: limits on all bytes and times, the client's name from its TLS certificate,
errors in our own form.

Source: RFC 9110 (HTTP semantics), RFC 9112 (HTTP/1.1).
"""

from __future__ import annotations

import asyncio
import enum
import socket
import ssl
import sys
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tureen.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, TureenError, Unavailable
from tureen.http.awake import AwakeTimer
from tureen.http.call import call_of
from tureen.http.errors import error_object
from tureen.http.head import authority, body_length
from tureen.http.listener import UNIX
from tureen.http.tls import subject_name

MAX_FRAMING_BYTES = 64 << 10
"""Maximum number of bytes of a request outside its body: request line, headers, chunk sizes and extensions,
trailers."""
BODY_BYTES_PER_FRAMING_BYTE = 8
"""Number of content bytes that allow a chunked body one more byte of framing."""
MAX_HEADERS = 256
MAX_UNREAD_BYTES = 64 << 10
"""Maximum number of bytes kept of pipelined requests, which a client sends before the last one is answered. Beyond it,
nothing is read until that answer is sent."""
MAX_DISCARDED_BYTES = 32 << 20
"""Maximum number of bytes of a body that are read and dropped after an early answer. A client that is disconnected
while it sends may never read the answer."""
MAX_PIECE_BYTES = 16 << 10
"""Maximum number of bytes for the parser between two checks of the limits. A body of known length is passed whole."""
MAX_PIECES = 64
"""Maximum number of pieces that are parsed in one turn of the event loop."""
HEAD_TIMEOUT_S = 10.0
"""Time within which the headers of a request must have arrived."""
WRITE_TIMEOUT_S = 60.0
"""Time after which a client that has read nothing of its answer counts as gone."""
END = b"\r\n\r\n"
"""Bytes that end the headers, and a chunked body."""


class Phase(enum.Enum):
    """The part of a request that the parser is in."""

    BETWEEN = enum.auto()  # nothing of the next request was seen
    HEAD = enum.auto()
    BODY = enum.auto()  # up to the end of the request, trailers too


class Admission(NamedTuple):
    """The server's limit on connections, and its record of refusals."""

    max_connections: int = sys.maxsize
    note_refusal: Callable[[str, TureenError], None] = lambda *_: None
    """Called with request id and error if the connection refuses a request, which the application then never gets."""


class Connection(HttpToolsProtocol):
    """Refuses requests that are too large, too slow or not HTTP/1.1. Answers requests one after the other, and ignores
    upgrades to another protocol.

    The parser gets at most one request at a time, so that each byte counts for the right one. The call in the
    scope has the name in the verified certificate of the client, "" without one.
    """

    def __init__(self, *args: Any, admission: Admission | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admission = admission or Admission()
        self._late: AwakeTimer | None = None  # runs while the connection waits for headers
        self._stalled: AwakeTimer | None = None  # runs while bytes wait for the client to read them
        self._phase = Phase.BETWEEN
        self._unread = bytearray()
        self._turn: asyncio.Handle | None = None  # set while parsing goes on in the next turn of the event loop
        self._seam = b""  # the last three bytes that were parsed: END may begin in them
        self._framing_bytes = 0
        self._body_bytes = 0
        self._body_left: int | None = 0  # bytes of the body not parsed yet; None: the body is chunked
        self._context: ssl.SSLContext | None = None
        self._client_name = ""

    # Callbacks of asyncio's protocol, then of the HTTP parser, as uvicorn's class has them.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._context = transport.get_extra_info("sslcontext")
        self._client_name = subject_name(transport.get_extra_info("peercert"))
        if len(self.connections) > self._admission.max_connections:
            self._refuse(_too_many(self._admission.max_connections))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._unread.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._turn is None:
            self._read()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writing()
        if self._turn is None:
            self._read()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def on_message_begin(self) -> None:
        if self._phase is Phase.BODY:
            return  # the head that _ignore_upgrade feeds
        if self._is_answering:
            raise InvalidRequest("a request must end with CR LF", code="invalid_http")
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._phase = Phase.HEAD
        call_of(cast(Scope, self.scope)).client_name = self._client_name
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            self.scope["client"] = UNIX
        self._await_head()

    def on_url(self, url: bytes) -> None:
        if self._phase is Phase.HEAD:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not Phase.HEAD:
            return  # a trailer: never a header (RFC 9110, 6.5)
        if len(self.headers) == MAX_HEADERS:
            raise HeadersTooLarge(f"the request has more than {MAX_HEADERS} header lines")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._phase is not Phase.HEAD:
            return
        self._stop_waiting()
        self._check_framing()
        host, version = authority(self.url), self.parser.get_http_version()
        if host is not None:
            self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]
        self._body_left = body_length(self.parser.get_method(), version, self.headers)
        if version == "1.0":
            self.expect_100_continue = False
            self.app = _unchunked(self.app, lambda: self.cycle)  # uvicorn's state of the request, made below
        super().on_headers_complete()
        self._phase = Phase.BODY
        if self._context is not self.config.ssl or self.expect_100_continue:
            # with "Expect: 100-continue" it is unknown whether a body or a request follows
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)
        if self.cycle.response_complete and self._body_bytes > MAX_DISCARDED_BYTES:
            self.transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser waits for another protocol; _ignore_upgrade goes on with the body
        self._phase = Phase.BETWEEN
        self._framing_bytes = self._body_bytes = 0
        super().on_message_complete()

    def retire(self) -> None:
        """Closes the connection after the current request, because the certificates have changed."""
        if self._late is None:
            self.shutdown()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _read(self) -> None:
        """Parses the received bytes, up to the end of a request that is not answered yet."""
        self._turn = None
        for _ in range(MAX_PIECES):
            if not self._may_read():
                break
            self._parse_piece()
        if self._may_read():
            self._turn = self.loop.call_soon(self._read)
        if self.transport.is_closing():
            self._unread.clear()
        elif len(self._unread) > MAX_UNREAD_BYTES:
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse_piece(self) -> None:
        size = self._piece_size()
        piece = bytes(self._unread[:size])
        del self._unread[:size]
        self._seam = (self._seam + piece[-3:])[-3:]
        self._framing_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
            self._check_framing()
            if self._phase is Phase.BETWEEN:
                self.parser = httptools.HttpRequestParser(self)  # without the state that trailers may have left
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserError as error:
            raised = error.__context__  # the error of a callback of ours, if it was one
            invalid = InvalidRequest("this is not a proper HTTP/1.1 request", code="invalid_http")
            self._refuse(raised if isinstance(raised, TureenError) else invalid)
        except HeadersTooLarge as error:
            self._refuse(error)

    def _may_read(self) -> bool:
        is_held = self._phase is Phase.BETWEEN and self._is_answering
        return bool(self._unread) and not is_held and not self.transport.is_closing()

    def _piece_size(self) -> int:
        """Returns how many bytes the parser may get next: nothing beyond the end of the request."""
        if self._body_left:
            return self._body_left
        across = (self._seam + self._unread[:3]).find(END)
        if across >= 0:
            return across + len(END) - len(self._seam)
        end = self._unread.find(END, 0, MAX_PIECE_BYTES)
        return MAX_PIECE_BYTES if end < 0 else end + len(END)

    def _ignore_upgrade(self) -> None:
        """Ignores an upgrade: a new parser, which first gets headers with the same framing, parses the rest of the
        request's body."""
        self.parser = httptools.HttpRequestParser(self)
        chunked, known = b"Transfer-Encoding: chunked", b"Content-Length: %d" % (self._body_left or 0)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + (chunked if self._body_left is None else known) + END)

    def _check_framing(self) -> None:
        if self._framing_bytes > MAX_FRAMING_BYTES + self._body_bytes // BODY_BYTES_PER_FRAMING_BYTE:
            parts = "the request line, headers" + (", chunk sizes and trailers" if self._phase is Phase.BODY else "")
            raise HeadersTooLarge(f"{parts} are larger than {MAX_FRAMING_BYTES} bytes")

    def _await_head(self) -> None:
        self._stop_waiting()
        self._late = AwakeTimer(HEAD_TIMEOUT_S, self._on_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        self._refuse(RequestTimeout(f"the request's headers did not arrive within {HEAD_TIMEOUT_S:.0f} s"))

    def _watch_writing(self) -> None:
        """Starts the timer within which the client must read some of the written bytes, also while the connection is
        closing."""
        self._stop_watching()
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes:
            self._stalled = AwakeTimer(WRITE_TIMEOUT_S, partial(self._look_at_writing, num_bytes))

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _look_at_writing(self, num_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes:
            self._watch_writing()
        else:
            self.transport.abort()

    def _refuse(self, error: TureenError) -> None:
        """Answers with an error, unless an answer has begun, and closes the connection."""
        is_heard = self._phase is Phase.BODY  # the application has the request
        has_begun = self.cycle.response_started if is_heard else self._is_answering
        if not has_begun:
            request_id = uuid.uuid4().hex[:12]
            if is_heard:
                call = call_of(cast(Scope, self.scope))
                request_id = call.request_id = call.request_id or request_id
                call.refusal_status = error.status
            else:
                self._admission.note_refusal(request_id, error)
            self.transport.write(_refusal(request_id, error))
        self.transport.close()
        self._watch_writing()


def _unchunked(app: ASGIApp, cycle: Callable[[], RequestResponseCycle]) -> ASGIApp:
    """Wraps the application for HTTP/1.0, which has no chunks: a body of unknown length ends with the connection
    (RFC 9112, 6.3)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle().chunked_encoding = None if has_length else False
            elif not has_length:
                cycle().expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer


def _refusal(request_id: str, error: TureenError) -> bytes:
    """Returns the bytes of an answer after which the connection is closed."""
    body = msgspec.json.encode(error_object(error))
    extra_headers = f"retry-after: {error.retry_after_s}\r\n" if isinstance(error, Unavailable) else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n{extra_headers}connection: close\r\n\r\n"
    )
    return head.encode() + body


def _too_many(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} connections are open, the most that this server takes: three in four of the files that it may open "
        "(ulimit -n); close some, or try again later",
        code="too_many_connections",
    )
