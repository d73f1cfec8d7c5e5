"""An App that synchronous HTTP clients reach, official ones too: without a socket or a thread.

The application's event loop runs while a client waits for the head or the next piece of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import httpx
from app_under_test import App
from timeouts import until

PORTS = itertools.count(1)
"""Of this process's ServedApps: ports that no real server has."""


CLIENTS = [importlib.import_module(name) for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
"""The libraries that official clients send with."""


class ServedApp(App):
    """Inside `with`, synchronous clients find it at `url`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.port = next(PORTS)
        self.url = f"http://127.0.0.1:{self.port}"
        self._exchanges: set[Exchange] = set()
        self._patches = contextlib.ExitStack()

    @property
    def stats(self) -> Any:
        return self.client.stats

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    def abandon(self, path: str, body: dict[str, Any], has_begun: Callable[[], object]) -> None:
        """Ask, and leave when it has begun."""
        self.run(self._abandon(httpx.Request("POST", self.url + path, json=body), has_begun))

    async def _abandon(self, request: httpx.Request, has_begun: Callable[[], object]) -> None:
        exchange = Exchange(self.app, request)
        await until(has_begun, "the beginning of what is left", unless=exchange.running)
        await exchange.leave()

    def __enter__(self) -> ServedApp:
        for library in CLIENTS:
            send = mock.patch.object(library.HTTPTransport, "handle_request", self._sender(library))
            self._patches.enter_context(send)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for exchange in self._exchanges:
            if not exchange.running.done():
                self.run(exchange.leave())
        self.close()

    def _sender(self, library: Any) -> Callable[..., Any]:
        """Return the method that sends a request of this library's client: to this application, or as before."""
        before = library.HTTPTransport.handle_request

        class Body(_Body, library.SyncByteStream):
            """With the class that the library asks for."""

        def handle_request(transport: Any, request: Any) -> Any:
            if request.url.port != self.port:
                return before(transport, request)
            request.read()
            exchange = self.run(_begin(self.app, request))
            self._exchanges.add(exchange)
            return library.Response(exchange.status, headers=exchange.headers, stream=Body(self, exchange))

        return handle_request


class Exchange:
    """One request to an ASGI application, and what has come of its answer."""

    def __init__(self, app: Any, request: Any) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._request = [{"type": "http.request", "body": request.content, "more_body": False}]
        self._pieces: list[bytes] = []
        self._has_left = asyncio.Event()
        self._has_head = asyncio.Event()
        self._has_news = asyncio.Event()
        self._is_complete = False
        self.running = asyncio.create_task(app(_scope(request), self._receive, self._send))

    async def piece(self) -> bytes | None:
        """Return what has come since; None at the end."""
        while not self._pieces and not self._is_complete:
            self._has_news.clear()
            await self._has_news.wait()
        pieces, self._pieces = self._pieces, []
        if not pieces:
            await self.running
        return b"".join(pieces) if pieces else None

    async def leave(self) -> None:
        """Close the connection, and see that the application notices."""
        self._has_left.set()
        await asyncio.wait({self.running})

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                self._pieces.append(body)
            self._is_complete = not message.get("more_body", False)
            self._has_head.set()
        self._has_news.set()
        await asyncio.sleep(0)  # the client takes each piece

    async def head(self) -> None:
        await self._has_head.wait()


def _scope(request: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 5),
        "root_path": "",
    }


async def _begin(app: Any, request: Any) -> Exchange:
    """Return an exchange whose head has come."""
    exchange = Exchange(app, request)
    heading = asyncio.create_task(exchange.head())
    await asyncio.wait({heading, exchange.running}, return_when=asyncio.FIRST_COMPLETED)
    if not heading.done():
        heading.cancel()
        await exchange.running  # which raises why there is no answer
        raise AssertionError("the application returned without an answer")
    return exchange


class _Body:
    def __init__(self, app: ServedApp, exchange: Exchange) -> None:
        self._app = app
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._app.run(self._exchange.piece())) is not None:
            yield piece

    def close(self) -> None:
        if not self._exchange.running.done():
            self._app.run(self._exchange.leave())
