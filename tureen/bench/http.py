"""A small HTTP/1.1 client with keep-alive that hands out server-sent events as they arrive.

httpx spends several times as long on a small event (figures in bench/README.md), on a machine where client and server
share the cores: at a few thousand tokens a second it would take a core away from the server it measures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from tureen.errors import TureenError

READ_SIZE = 1 << 16
CONNECT_TIMEOUT_S = 10.0


class BenchError(TureenError):
    """The measurement cannot be made, or its result would be wrong."""

    code = "bench_error"


class HttpError(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status = status


class Address:
    """The address of a server. Raises BenchError for what is not a plain http URL."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise BenchError(f"--url {url}: the port must be a number below 65536") from None
        if parts.scheme != "http" or not parts.hostname:
            raise BenchError(f"--url {url}: must be http://HOST:PORT (no TLS: it would be measured too)")
        self.url = url
        self.host = parts.hostname
        self.port = port or 80
        self.prefix = parts.path.rstrip("/")
        self.headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")


class ClientConnection:
    """One keep-alive connection, for one request at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Sends a request; returns status and whole body. Raises OSError when there is no connection."""
        reader, status, headers = await self._exchange(method, path, body)
        return status, b"".join([piece async for piece in self._pieces(reader, headers)])

    async def events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yields the data of every event of the answer to a POST. Raises HttpError for a status other than 200."""
        reader, status, headers = await self._exchange("POST", path, body)
        if status != 200:
            raise HttpError(status, b"".join([piece async for piece in self._pieces(reader, headers)]))
        rest = b""
        async for piece in self._pieces(reader, headers):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _exchange(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, int, dict[bytes, bytes]]:
        """Sends a request and reads the head of the answer. Where a kept connection has ended, tries once more on a new
        one."""
        head = (
            f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self.address.headers}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        while True:
            kept = self._streams is not None
            reader, writer = self._streams or await self._open()
            try:
                writer.write(head + body)
                await writer.drain()
                return reader, *_parse_head(await reader.readuntil(b"\r\n\r\n"))
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
                if not kept:
                    raise ConnectionError("the server closed the connection without an answer") from None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opening = asyncio.open_connection(self.address.host, self.address.port, limit=READ_SIZE)
        self._streams = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        return self._streams

    async def _pieces(self, reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
        """Yields the body in whatever pieces it comes. Keeps the connection only when the end was reached and allows
        it."""
        finished = False
        try:
            if headers.get(b"transfer-encoding") == b"chunked":
                while size := int((await reader.readline()).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readline()
            elif b"content-length" in headers:
                yield await reader.readexactly(int(headers[b"content-length"]))
            else:
                headers = {b"connection": b"close"}
                while piece := await reader.read(READ_SIZE):
                    yield piece
            finished = True
        except (asyncio.IncompleteReadError, ValueError):
            raise ConnectionError("the server closed the connection in the middle of an answer") from None
        finally:
            if not finished or headers.get(b"connection", b"").lower() == b"close":
                self.close()


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.rstrip().split(b"\r\n")
    fields = (line.partition(b":") for line in lines)
    return int(first.split(b" ", 2)[1]), {name.lower(): value.strip() for name, _, value in fields}
