"""One HTTP request to the application without a socket: what the server under it would do, with checks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from tureen.http.connection import WRITE_TIMEOUT_S

LIMIT_S = 100_000.0
"""Of virtual time, for any answer: far more than what can go wrong in a simulation takes."""


class Exchange:
    """A request and what is answered. Its client may leave at any time."""

    pace_s = 0.0
    """How long the client takes for each piece of the answer."""

    address = "127.0.0.1"
    """The client's."""

    def __init__(self, app: Any, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.has_left = False
        self._pieces = [json.dumps(body).encode() if body is not None else b""]
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        given = {"host": "127.0.0.1", "content-type": "application/json"} | headers
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0"},
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
            "client": (self.address, 1),
            "server": ("127.0.0.1", 80),
        }
        self.running = asyncio.create_task(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    async def wait(self, until: Callable[[], object] = lambda: False) -> None:
        """Until the answer is complete, or until something is true that an answer's piece may make so."""
        async with asyncio.timeout(LIMIT_S):
            while not (self.running.done() or until()):
                self._news.clear()
                waiting = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({waiting, self.running}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        if self.running.done():
            self.running.result()
            assert self.is_complete or self.has_left, "the application returned without an end of its answer"

    async def give_up(self) -> None:
        """The client stalls; its connection is closed after the time that it has."""
        self.has_left = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await asyncio.wait({self.running})
        await self.leave()

    async def leave(self) -> None:
        """Close the connection, and see that the application notices."""
        self.has_left = True
        self._gone.set()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self.running})
        self.running.result()

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            return {"type": "http.request", "body": self._pieces.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        assert not self.is_complete, "something is sent after the end of an answer"
        if message["type"] == "http.response.start":
            assert not self.status, "an answer has two heads"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status, "an answer has no head"
            if not self.has_left:
                self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
            if self.is_complete:
                self._gone.set()
        self._news.set()
        await asyncio.sleep(self.pace_s if message.get("more_body", False) else 0)  # the last piece needs no room
