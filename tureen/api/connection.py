"""An HTTP/1.1 connection: uvicorn's, with limits on a request's head, the TLS client's name, errors in our shape."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tureen.api.errors import error_object
from tureen.api.tls import subject_name
from tureen.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, TureenError

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """Refuses a head (request line and headers) that is too large or does not arrive in time.

    `scope["client_name"]` is the name in the verified certificate of the client, "" without one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None  # set while a head is awaited
        self._head_bytes = 0  # of a head that takes several reads; bounds what the parser keeps
        self._context: ssl.SSLContext | None = None
        self._client_name = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._context = transport.get_extra_info("sslcontext")
        self._client_name = subject_name(transport.get_extra_info("peercert"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._late is not None
        super().data_received(data)
        if was_in_head and self._late is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["client_name"] = self._client_name  # type: ignore[typeddict-unknown-key]
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        num_bytes = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
            raise ValueError("the head is too large")  # ends the parsing
        super().on_headers_complete()
        if self._context is not self.config.ssl:
            self.cycle.keep_alive = False

    def retire(self) -> None:
        """The certificates have changed: the request that is under way is this connection's last."""
        if self._late is None:
            self.shutdown()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        if not self.transport.is_closing():
            self._refuse(InvalidRequest("this is not a proper HTTP/1.1 request", code="invalid_http"))

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_bytes = 0
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # a pipelining client: its next request waits for the answer before it
        else:
            self._refuse(RequestTimeout(f"the request's headers did not arrive within {HEAD_TIMEOUT_S:.0f} s"))

    def _refuse(self, error: TureenError) -> None:
        """Answer, unless that would go into the middle of another answer, and close."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = msgspec.json.encode(error_object(error))
            head = (
                f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")
