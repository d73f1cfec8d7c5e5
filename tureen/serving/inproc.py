"""An engine in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from tureen.engine.loop import Loop, SteppedEngine
from tureen.errors import StartupError, TureenError
from tureen.log import Progress, get_logger, no_progress
from tureen.serving.streams import Streams, Watch
from tureen.types import (
    Abort,
    Close,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    GenerateRequest,
    OutputDelta,
    Phase,
    Ready,
    ToEngine,
)

EngineFactory = Callable[[Progress], tuple[SteppedEngine, EngineInfo]]

CLOSE_TIMEOUT_S = 10.0
REPORT_S = 0.05

log = get_logger("serving")


class InprocClient:
    """Runs the factory and the engine's loop in a daemon thread. See EngineClient."""

    info: EngineInfo

    def __init__(self, make_engine: EngineFactory, *, watchdog_timeout_s: float = 300.0) -> None:
        self._make_engine = make_engine
        self._watchdog_timeout_s = watchdog_timeout_s
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._event_loop = asyncio.get_running_loop()
        self._streams = Streams(self._inbox.put)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_sign = time.monotonic()
        self._watcher: asyncio.Task[None] | None = None
        self._phase = ""  # that was reported last, and when
        self._reported_s = 0.0

    async def start(self, progress: Progress = no_progress) -> EngineInfo:
        """Returns when the engine is ready. Raises StartupError when it cannot be built."""
        self._streams.progress = progress
        self._thread.start()
        try:
            self.info = await self._streams.ready
        except StartupError:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)  # an exit in the middle of torch would crash
            raise
        self._watcher = asyncio.create_task(self._watch())
        return self.info

    def generate(
        self, request: GenerateRequest, interval: int = 1, watch: Watch | None = None
    ) -> AsyncIterator[OutputDelta]:
        return self._streams.generate(request, interval, watch)

    def abort(self, request_id: str, reason: str = "client") -> None:
        self._inbox.put(Abort(request_id, reason))

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
        if self._watcher is not None:
            self._watcher.cancel()
        self._inbox.put(Close())
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        self._drain()
        self._streams.fail("it was closed")

    def _run(self) -> None:
        try:
            engine, info = self._make_engine(self._report)
        except TureenError as error:
            self._publish(Failed(error.message, startup=True))
            return
        except Exception as error:  # an edge: the thread's end must be heard of
            log.exception("the engine could not be built")
            self._publish(Failed(f"the engine could not be built: {type(error).__name__}", startup=True))
            return
        self._publish(Ready(info))
        Loop(engine, self._take, self._publish).run()

    def _report(self, phase: str, done: int, total: int) -> None:
        """Not every weight: each report takes the interpreter from the thread that loads them."""
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._reported_s < REPORT_S:
            return
        self._phase, self._reported_s = phase, now
        self._publish(Phase(phase, done, total))

    def _take(self, wait_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if wait_s != 0:
            with contextlib.suppress(queue.Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _publish(self, message: FromEngine) -> None:
        """Called in the engine's thread: one wake-up of the event loop for all that has gathered."""
        self._outbox.append(message)
        if len(self._outbox) == 1:
            try:
                self._event_loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the event loop is closed: nobody listens any more
                self._outbox.clear()

    def _drain(self) -> None:
        self._last_sign = time.monotonic()
        while self._outbox:
            self._streams.receive(self._outbox.popleft())

    async def _watch(self) -> None:
        """A step that never ends cannot be told from a long one but by its length."""
        while True:
            await asyncio.sleep(min(1.0, self._watchdog_timeout_s / 4))
            if not self._streams.is_waiting:
                self._last_sign = time.monotonic()
            elif time.monotonic() - self._last_sign > self._watchdog_timeout_s:
                self._streams.fail(f"no step ended within {self._watchdog_timeout_s:g} s")
