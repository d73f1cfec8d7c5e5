"""Runs an engine in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from tureen.contract.types import Close, EngineInfo, EngineReady, FromEngine, StartupPhase, ToEngine
from tureen.engine.loop import Loop, SteppedEngine
from tureen.log import Progress
from tureen.sandbox.stacks import deep_stacks
from tureen.serving.healing import HealingClient
from tureen.serving.startup_failure import startup_failure
from tureen.serving.watchdog import Sign, processor_s

EngineFactory = Callable[[Progress], tuple[SteppedEngine, EngineInfo]]

CLOSE_TIMEOUT_S = 10.0
ENGINE_THREAD = "engine"
REPORT_S = 0.05


class ThreadHost:
    """A Host that runs the factory and the engine's loop in a daemon thread.

    An engine that raises is replaced by another one in another thread; one that hangs cannot be ended.
    """

    can_be_killed = False

    def __init__(
        self,
        make_engine: EngineFactory,
        epoch: int,
        receive: Callable[[FromEngine], None],
        lose: Callable[[str], None],
    ) -> None:
        self._make_engine = make_engine
        self._receive = receive
        self._lose = lose
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._phase = ""  # that was reported last, and when
        self._reported_s = 0.0

    async def start(self) -> None:
        with deep_stacks():
            self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def sign(self) -> Sign:
        """Returns signs of life. A thread that waits for the interpreter does not answer; but then this one does not
        look either."""
        return Sign(True, processor_s(self._thread.native_id, is_thread=True) if self._thread.native_id else 0.0)

    async def close(self, *, at_once: bool) -> None:
        """Ends the engine. A thread ends after its step, or never, whatever `at_once` says."""
        self._inbox.put(Close())
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            await asyncio.to_thread(_forget)
        self._drain()

    def _run(self) -> None:
        try:
            engine, info = self._make_engine(self._report)
        except Exception as error:  # noqa: BLE001 - an edge: the thread's end must be reported
            self._publish(startup_failure(error))
            return
        self._publish(EngineReady(info))
        Loop(engine, self._take, self._publish).run()

    def _report(self, phase: str, done: int, total: int) -> None:
        """Reports progress, but not of every weight: each report takes the interpreter from the thread that loads
        them."""
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._reported_s < REPORT_S:
            return
        self._phase, self._reported_s = phase, now
        self._publish(StartupPhase(phase, done, total))

    def _take(self, wait_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if wait_s != 0:
            with contextlib.suppress(queue.Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _publish(self, message: FromEngine) -> None:
        """Passes a message to the event loop, with one wake-up for all that has gathered. Called in the engine's
        thread."""
        self._outbox.append(message)
        if len(self._outbox) == 1:
            try:
                self._event_loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the event loop is closed
                self._outbox.clear()

    def _drain(self) -> None:
        while self._outbox:
            self._receive(self._outbox.popleft())


class InprocClient(HealingClient):
    """An EngineClient whose engine runs in a thread."""

    def __init__(self, make_engine: EngineFactory, *, watchdog_timeout_s: float = 300.0) -> None:
        def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> ThreadHost:
            return ThreadHost(make_engine, epoch, receive, lose)

        super().__init__(make_host, watchdog_timeout_s=watchdog_timeout_s, freeze_grace_s=watchdog_timeout_s)


def _forget() -> None:
    """Frees what an engine that has ended leaves behind, also where it was kept for good."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
