"""Connections within one event loop: what `asyncio` opens and listens to, without sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from asyncio import sslproto
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

Taken = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

FIRST_PORT = 20_001


class MemorySocket:
    """The facts about a connection that are asked for. `pid`: the process at the other end."""

    family = socket.AF_INET

    def __init__(self, pid: int = 0) -> None:
        self._pid = pid

    def setsockopt(self, *_: object) -> None:
        """Does nothing."""

    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("3i", self._pid, 0, 0)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. What is written reaches the other end in order, a turn of the loop later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer_pid: int) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "socket": MemorySocket(peer_pid)})
        self._loop = loop
        self._inbox: deque[bytes | None] = deque()  # None: the other end has closed
        self._is_closing = False
        self.other: MemoryTransport

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: Any) -> None:
        if data and not self._is_closing:
            self.other.put(bytes(data))

    def put(self, data: bytes | None) -> None:
        self._inbox.append(data)
        self._loop.call_soon(self._deliver)

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self.other._end(ConnectionResetError(104, "Connection reset by peer"))
        self._end(None)

    def _force_close(self, error: Exception | None) -> None:
        self._end(error)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Does nothing: a message has room in memory."""

    resume_reading = pause_reading

    def _end(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)
            self.other.put(None)

    def _deliver(self) -> None:
        data = self._inbox.popleft()
        if self._is_closing:
            return
        if data is None:
            self._protocol.eof_received()
            self.close()
        elif isinstance(self._protocol, asyncio.BufferedProtocol):
            asyncio.protocols._feed_data_to_buffered_proto(self._protocol, data)
        else:
            self._protocol.data_received(data)


class MemoryServer:
    """See asyncio.Server."""

    def __init__(self, network: MemoryNetwork, address: Any) -> None:
        self._network = network
        self._address = address
        self.sockets = [self]

    def getsockname(self) -> Any:
        return self._address

    def close(self) -> None:
        self._network.listeners.pop(self._address, None)

    async def __aenter__(self) -> MemoryServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class MemoryNetwork:
    """What listens, by address. Stands for the functions of `asyncio` of the same names."""

    def __init__(self) -> None:
        self.listeners: dict[Any, tuple[Taken, ssl.SSLContext | None, int]] = {}
        self._next_port = FIRST_PORT
        self._tasks: set[asyncio.Task[None]] = set()

    def install(self, patch: pytest.MonkeyPatch, *, is_unix_only: bool = False) -> None:
        unix = ("open_unix_connection", "start_unix_server")
        for name in unix if is_unix_only else (*unix, "open_connection", "start_server"):
            patch.setattr(asyncio, name, getattr(self, name))

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port - 1

    def listen(self, address: Any, taken: Taken, context: ssl.SSLContext | None = None, pid: int = 0) -> None:
        self.listeners[address] = taken, context, pid

    async def start_server(
        self, taken: Taken, host: str, port: int, *, ssl: ssl.SSLContext | None = None, **_: object
    ) -> MemoryServer:
        address = ("127.0.0.1" if host == "0.0.0.0" else host, port or self.free_port())
        self.listen(address, taken, ssl)
        return MemoryServer(self, address)

    async def start_unix_server(self, taken: Taken, path: str) -> MemoryServer:
        self.listen(str(path), taken)
        return MemoryServer(self, str(path))

    async def open_unix_connection(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._connect(str(path), None, None)

    async def open_connection(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None = None, server_hostname: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._connect((host, port), ssl, server_hostname)

    async def _connect(
        self, address: Any, context: ssl.SSLContext | None, name: str | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if address not in self.listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        taken, server_context, pid = self.listeners[address]
        loop = asyncio.get_running_loop()
        near, far = MemoryTransport(loop, pid), MemoryTransport(loop, 0)
        near.other, far.other = far, near

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = loop.create_task(taken(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        _begin(loop, far, asyncio.StreamReader(loop=loop), accept, server_context)
        reader, opened = asyncio.StreamReader(loop=loop), loop.create_future()
        protocol = _begin(loop, near, reader, None, context, name, opened)
        if context is not None:
            await opened
            return reader, asyncio.StreamWriter(protocol.transport_of_app, protocol.app, reader, loop)
        return reader, asyncio.StreamWriter(near, protocol, reader, loop)


def _begin(
    loop: asyncio.AbstractEventLoop,
    transport: MemoryTransport,
    reader: asyncio.StreamReader,
    accept: Callable[..., None] | None,
    context: ssl.SSLContext | None,
    name: str | None = None,
    opened: asyncio.Future[None] | None = None,
) -> Any:
    """Connect one end with a reader, through TLS if `context` is given."""
    app = asyncio.StreamReaderProtocol(reader, accept, loop=loop)
    protocol: Any = app
    if context is not None:
        protocol = sslproto.SSLProtocol(loop, app, context, opened, accept is not None, name)
        protocol.app, protocol.transport_of_app = app, protocol._get_app_transport()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    return protocol
