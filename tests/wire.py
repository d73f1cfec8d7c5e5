"""Bytes to and from the server's HTTP protocol without sockets: a transport in memory, a clock that tests move."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import uvicorn
from app_under_test import App
from starlette.requests import Request
from starlette.responses import JSONResponse
from timeouts import until
from uvicorn.server import ServerState as Uvicorn
from virtual_clock import Clock, VirtualLoop

from tureen.http.connection import Connection
from tureen.http.dialect import Entry
from tureen.http.server import Server

READ_BYTES = 256 << 10
"""Most that an event loop hands over at once."""

SETTLE_S = 1e-3
"""More than the turns take in which a server reads what has arrived (virtual_clock.TURN_S each)."""


class Transport(asyncio.Transport):
    """What the server wrote, and whether it reads. `is_closed`: it closed the connection; `is_lost`: nothing is left of
    it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 30000)})
        self.written = b""
        self.is_closed = self.is_lost = False
        self.is_reading_ = True
        self.num_untaken = 0  # bytes that the client has not taken
        self.protocol: Connection

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True
        if not self.is_lost and not self.num_untaken:  # else when the client has taken it
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.num_untaken = 0
        self.close()

    def take(self, num_bytes: int) -> None:
        """The client takes so much of what waits for it."""
        self.num_untaken -= min(self.num_untaken, num_bytes)
        if self.is_closed:
            self.close()

    def get_write_buffer_size(self) -> int:
        return self.num_untaken

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading_ = False

    def resume_reading(self) -> None:
        self.is_reading_ = True


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def told(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A client's end of a connection to an application."""

    def __init__(self, server: Connection) -> None:
        self.transport = Transport()
        self.server = self.transport.protocol = server
        self.server.connection_made(self.transport)
        self.num_sent = 0

    @property
    def is_closed(self) -> bool:
        return self.transport.is_closed

    async def send(self, *parts: bytes) -> None:
        """Each part arrives by itself; all that can be done about it is done before the next."""
        for part in parts:
            if self.is_closed or not self.transport.is_reading_:
                return
            self.num_sent += len(part)
            self.server.data_received(part)
            await self.settle()

    async def settle(self) -> None:
        await asyncio.sleep(SETTLE_S)

    async def send_forever(self, part: bytes, limit: int = 64 << 20) -> int:
        """How many bytes were taken until the server read no more of `part`, again and again."""
        before = self.num_sent
        while not self.is_closed and self.transport.is_reading_ and self.num_sent - before < limit:
            await self.send(part)
        return self.num_sent - before

    async def trickle(self, part: bytes, every_s: float, count: int) -> float:
        """When, on the loop's clock, the server had enough of it."""
        for _ in range(count):
            await self.send(part)
            if self.is_closed:
                break
            await asyncio.sleep(every_s)
        return asyncio.get_running_loop().time()

    def answers(self, methods: str = "") -> list[Answer]:
        """All that was written; `methods`: "H" for each HEAD among the requests, in their order."""
        rest, found = self.transport.written, []
        while rest:
            head, end, rest = rest.partition(b"\r\n\r\n")
            assert end, head
            line, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
            size = 0 if methods[len(found) : len(found) + 1] == "H" else int(headers.get("content-length", 0))
            assert len(rest) >= size
            found.append(Answer(int(line.split()[1]), headers, rest[:size]))
            rest = rest[size:]
        return found


async def echo(request: Request) -> JSONResponse:
    """What the application sees of a request."""
    body = await request.body()
    seen = {
        "method": request.method,
        "path": request.scope["path"],
        "query": request.scope["query_string"].decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.scope["headers"]],
        "body": body.decode("latin-1"),
    }
    return JSONResponse(seen)


@contextlib.contextmanager
def echoing(**settings: Any) -> Iterator[App]:
    """The whole application, which answers at /echo what it sees there, and knows no more of the engine."""
    with App(**settings) as app:
        app.app.router.routes.append(Entry("/echo", echo, access="user", methods=["GET", "POST"]))
        yield app


def told(app: App, sent: bytes) -> bytes:
    """What a client reads until the product's server closes the connection, for what it sent. The request must ask for
    the close, or be wrong. The clock is the application's, whose engine answers."""
    return all_told(app, [sent])[0]


def all_told(app: App, requests: Iterable[bytes]) -> list[bytes]:
    """The same of several clients of one server, one after the other."""
    server = Server(app.app, app.config, lambda: None)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)

    async def tell(sent: bytes) -> bytes:
        wire = Wire(server._connection())
        await wire.send(sent)
        await until(lambda: wire.is_closed, "the end of the connection")
        await wire.settle()
        return wire.transport.written

    return [app.run(tell(sent)) for sent in requests]


def played(app: Any, scene: Callable[[Wire], Any]) -> Any:
    """What `scene` returns for a new connection to the ASGI application `app`, on a clock of its own."""
    return all_played(app, [scene])[0]


def all_played(app: Any, scenes: Iterable[Callable[[Wire], Any]]) -> list[Any]:
    """The same of several, one after the other, each with a connection of its own."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, http=Connection, ws="none", timeout_keep_alive=5
    )
    config.load()

    async def play(scene: Callable[[Wire], Any]) -> Any:
        wire = Wire(Connection(config=config, server_state=Uvicorn(), app_state={}))
        result = await scene(wire)
        if not wire.is_closed:
            wire.transport.close()
        await wire.settle()
        return result

    clock = Clock()
    clock.now_s = 0.0
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return [runner.run(play(scene)) for scene in scenes]
