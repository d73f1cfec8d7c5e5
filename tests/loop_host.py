"""A host whose engine is stepped by a task of the event loop: an application and its engine in one thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from virtual_clock import Clock, Elsewhere

from tureen.contract.types import Close, EngineFailed, EngineReady, FromEngine, StartupPhase, ToEngine
from tureen.engine.loop import Loop
from tureen.errors import TureenError
from tureen.log import get_logger
from tureen.serving.healing import HealingClient
from tureen.serving.inproc import EngineFactory
from tureen.serving.watchdog import Sign

STEP_S = 1e-4
"""A step takes that long on the clock, and what it sleeps."""

SETTLE_S = 1e-6
"""Between two steps, so that the application takes what the first one brought: this many turns of the loop, or as many
as there is work for."""

WATCHDOG_S = 300.0

log = get_logger("serving")


class LoopHost:
    """See Host. It does what ThreadHost does, in an order that is always the same."""

    can_be_killed = False

    def __init__(self, make_engine: EngineFactory, clock: Clock, receive: Callable[[FromEngine], None]) -> None:
        self._make_engine = make_engine
        self._clock = clock
        self._receive = receive
        self._inbox: deque[ToEngine] = deque()
        self._outbox: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self.may_step = asyncio.Event()  # cleared by a test: the engine is in a step that does not end
        self.may_step.set()
        self._event_loop = asyncio.get_running_loop()

    async def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    def send(self, message: ToEngine) -> None:
        self._inbox.append(message)
        self._news.set()

    def sign(self) -> Sign:
        return Sign(has_answered=True, processor_s=self._clock.now_s)

    async def close(self, *, at_once: bool) -> None:
        self.send(Close())
        await asyncio.gather(self._running, return_exceptions=True)
        self._drain()

    async def _run(self) -> None:
        try:
            engine, info = self._make_engine(self._report)
        except TureenError as error:
            self._publish(EngineFailed(error.message, startup=True))
            return
        except Exception as error:
            log.exception("the engine could not be built")
            self._publish(EngineFailed(f"the engine could not be built: {type(error).__name__}", startup=True))
            return
        self._publish(EngineReady(info))
        self._slow_down(engine)
        loop = Loop(engine, self._take, self._publish, self._clock.monotonic)
        try:
            wait_s: float | None = 0.0
            while not loop._is_closed:
                await self._wait(wait_s)
                with Elsewhere():
                    for message in self._take():
                        loop._handle(message)
                if engine.has_work:
                    await self.may_step.wait()
                with Elsewhere():
                    wait_s = loop._turn()
        except Exception as error:
            log.exception("the engine failed")
            loop._fail(type(error).__name__)
        finally:
            engine.close()

    def _slow_down(self, engine: Any) -> None:
        step = engine.step

        def timed_step() -> Any:
            self._clock.sleep(STEP_S)
            return step()

        engine.step = timed_step

    async def _wait(self, wait_s: float | None) -> None:
        """Return when a message arrives, or after `wait_s` seconds. Other tasks run first in any case."""
        if self._inbox or wait_s == 0:
            await asyncio.sleep(SETTLE_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()

    def _take(self, _: float | None = None) -> list[ToEngine]:
        self._news.clear()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def _report(self, phase: str, done: int, total: int) -> None:
        self._publish(StartupPhase(phase, done, total))

    def _publish(self, message: FromEngine) -> None:
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._event_loop.call_soon(self._drain)

    def _drain(self) -> None:
        while self._outbox:
            self._receive(self._outbox.popleft())


def connect(make_engine: EngineFactory, clock: Clock) -> HealingClient:
    """Return a client whose engine is stepped on the running event loop."""

    def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> LoopHost:
        return LoopHost(make_engine, clock, receive)

    return HealingClient(make_host, watchdog_timeout_s=WATCHDOG_S, freeze_grace_s=WATCHDOG_S)
