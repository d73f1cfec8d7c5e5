"""A wire between a browser and a server that can be cut or held in the middle of a streamed answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading

EACH_TOKEN = ("--stream-interval", "1")
"""Flags of a server whose events can be counted: one for each token, however busy it is."""


class CutWire:
    """Forwards connections of its own port to `target`. What it does to the next streamed answer is set beforehand,
    so that nothing depends on the pace of either side."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.cut_after: int | None = None  # events of the next answer; then all connections end
        self.hold_after: int | None = None  # events of the next answer; what follows waits
        self.is_down = False  # new connections are refused
        self.was_cut = threading.Event()
        self.was_held = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._is_up.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def release(self) -> None:
        """Release the held answer. The next answer may be held, too."""
        self.hold_after = None
        self.was_held.clear()
        self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ended, self._released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._ended.wait()
        server.close()
        self._end_all()

    def _end_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            writer.transport.abort()
            return
        try:
            upstream, to_upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_upstream}
        ways = [asyncio.create_task(self._copy(reader, to_upstream)), asyncio.create_task(self._back(upstream, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for one in (writer, to_upstream):
            self._writers.discard(one)
            one.transport.abort()
        for way in ways:
            way.cancel()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_events, is_event = 0, False
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for line in data.splitlines(keepends=True):  # however many events are read at once
                    if line.startswith(b"HTTP/1.1 "):  # the next answer of this connection
                        num_events = 0
                    if self.cut_after is not None and num_events >= self.cut_after:
                        self.cut_after, self.is_down = None, True
                        self._end_all()
                        self.was_cut.set()
                        return
                    if self.hold_after is not None and num_events >= self.hold_after:
                        self.was_held.set()
                        await self._released.wait()
                    writer.write(line)
                    num_events += is_event and line == b"\n"
                    is_event = line.startswith(b"data: ")
                await writer.drain()
