"""An engine in a child process: msgpack over a socket pair. The parent imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from tureen.config import Config
from tureen.log import Progress, get_logger, no_progress
from tureen.serving.child import Order
from tureen.serving.framing import HEADER, PING, frame
from tureen.serving.pixels import Lender, ToChild
from tureen.serving.streams import Streams, Watch
from tureen.types import Abort, Close, EngineInfo, EngineStats, FromEngine, GenerateRequest, OutputDelta

PING_INTERVAL_S = 0.4
PONG_TIMEOUT_S = 1.5
"""A thread of its own answers pings, so a long step is no silence; a stopped process is noticed within two seconds."""

CLOSE_TIMEOUT_S = 10.0

log = get_logger("serving")


class ProcessClient:
    """Starts the child and talks to it. `factory` is "module:function". See EngineClient."""

    info: EngineInfo

    def __init__(self, factory: str, config: Config) -> None:
        self._order = Order(factory, config)
        self._watchdog_timeout_s = config.watchdog_timeout_s
        self._streams = Streams(self._send)
        self._lender = Lender(self._send)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._tasks: list[asyncio.Task[None]] = []
        self._last_pong = self._last_step = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, progress: Progress = no_progress) -> EngineInfo:
        """Returns when the engine is ready. Raises StartupError when it cannot be built."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tureen.serving.child", str(theirs.fileno())]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._streams.progress = progress
        self._writer.write(frame(self._encoder.encode(self._order)))
        self._tasks.append(asyncio.create_task(self._read(reader)))
        try:
            self.info = await self._streams.ready
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._watch()))
        return self.info

    def generate(
        self, request: GenerateRequest, interval: int = 1, watch: Watch | None = None
    ) -> AsyncIterator[OutputDelta]:
        if request.media:
            return self._generate_from_pictures(request, interval, watch)
        return self._streams.generate(request, interval, watch)

    def abort(self, request_id: str, reason: str = "client") -> None:
        self._send(Abort(request_id, reason))

    async def call(self, op: str, **args: Any) -> object:
        return await self._streams.call(op, **args)

    @property
    def failure(self) -> str | None:
        return self._streams.failure

    @property
    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def num_live(self) -> int:
        return self._streams.num_live

    async def close(self) -> None:
        """Ask the child to end, and make sure that it does."""
        child = self._child
        if child is None:
            return
        for task in self._tasks[1:]:
            task.cancel()
        if self._streams.failure is None:
            self._send(Close())
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, CLOSE_TIMEOUT_S)
        child.kill()
        await asyncio.to_thread(child.wait)
        await asyncio.gather(*self._tasks, return_exceptions=True)  # the reader ends with the child's last words
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _generate_from_pictures(
        self, request: GenerateRequest, interval: int, watch: Watch | None
    ) -> AsyncGenerator[OutputDelta, None]:
        request = self._lender.lend(request)
        try:
            async with contextlib.aclosing(self._streams.generate(request, interval, watch)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._lender.take_back(request)

    def _send(self, message: ToChild) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(self._encoder.encode(message)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """All that the child sends. The end of the stream is the child's death, noticed at once."""
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._last_pong = time.monotonic()
                if size:
                    self._streams.receive(self._decoder.decode(await reader.readexactly(size)))
                    self._last_step = self._last_pong
        except (asyncio.IncompleteReadError, ConnectionError):
            self._streams.fail("the engine process ended")

    async def _watch(self) -> None:
        """A stopped child answers no ping; a step that never ends is told by its length."""
        self._last_pong = self._last_step = time.monotonic()
        last_turn = time.monotonic()
        while True:
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(PING)
            await asyncio.sleep(PING_INTERVAL_S)
            now = time.monotonic()
            if now - last_turn > 2 * PING_INTERVAL_S:  # it was this process that slept
                self._last_pong = now
            last_turn = now
            if not self._streams.is_waiting:
                self._last_step = now
            if now - self._last_pong > PONG_TIMEOUT_S:
                self._streams.fail("the engine process does not answer")
            elif now - self._last_step > self._watchdog_timeout_s:
                self._streams.fail(f"no step ended within {self._watchdog_timeout_s:g} s")
