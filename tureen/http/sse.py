"""Sends streams: server-sent events with one `data:` line each, and responses that end when the client leaves.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html; `[DONE]` is OpenAI's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Message, Receive, Scope, Send

from tureen.http.call import call_of, until_gone

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """Returns a server-sent event; `payload` must have no line break."""
    return b"data: " + payload + b"\n\n"


class StreamedResponse:
    """An ASGI response whose body is a generator of parts. If the client leaves, the generator is closed and the call
    records it. `head`: the message `http.response.start`."""

    def __init__(self, head: Message, parts: AsyncGenerator[bytes, None]) -> None:
        self._head = head
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        sending = asyncio.ensure_future(self._send(send, call.send_part or send))
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            call.has_client_left = not sending.done()
        finally:
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, send: Send, send_part: Send) -> None:
        async with contextlib.aclosing(self._parts):
            await send(self._head)
            async for data in self._parts:
                await send_part({"type": "http.response.body", "body": data, "more_body": True})
            await send_part({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(StreamedResponse):
    """A response that is a stream of server-sent events, unless `headers` give it another content type."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        all_headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        } | (headers or {})
        encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
        super().__init__({"type": "http.response.start", "status": 200, "headers": encoded}, events)
