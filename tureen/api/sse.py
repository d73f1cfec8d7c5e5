"""Server-sent events: one `data:` line each, `[DONE]` at the end, the stream's end when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Message, Receive, Scope, Send

WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing for so long is taken for gone."""

NUM_LOOKS = 4
"""So often it is looked at meanwhile. Looks are counted, not seconds: whoever is stopped for a while cannot look."""

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class Parts:
    """An ASGI response over a generator of its parts, which is closed as soon as the client is gone. `head`: its first
    message."""

    def __init__(self, head: Message, parts: AsyncGenerator[bytes, None]) -> None:
        self._head = head
        self._parts = parts
        self._num_begun = 0  # parts that were given to the connection, and that it has taken
        self._num_taken = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get("send_part", send)))
        leaving = asyncio.ensure_future(until_gone(receive))
        both, num_looks, seen = {sending, leaving}, 0, 0
        try:
            while num_looks < NUM_LOOKS:
                done, _ = await asyncio.wait(
                    both, timeout=WRITE_TIMEOUT_S / NUM_LOOKS, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                is_stalled = self._num_begun > self._num_taken and self._num_begun == seen
                num_looks, seen = num_looks + 1 if is_stalled else 0, self._num_begun
        finally:
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, send: Send, send_part: Send) -> None:
        async with contextlib.aclosing(self._parts):
            await send(self._head)
            async for data in self._parts:
                self._num_begun += 1  # looked at now and then: a timer for every event would cost more than the event
                await send_part({"type": "http.response.body", "body": data, "more_body": True})
                self._num_taken += 1
            self._num_begun += 1
            await send_part({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Parts):
    """A stream of events."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        given = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        } | (headers or {})
        encoded = [(name.encode(), value.encode()) for name, value in given.items()]
        super().__init__({"type": "http.response.start", "status": 200, "headers": encoded}, events)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
