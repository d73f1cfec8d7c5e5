"""A client whose engine is stepped by a task: what a thread does, at times that are drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from virtual_time import VirtualLoop

from tureen.engine.engine import Engine
from tureen.engine.loop import Loop
from tureen.log import Progress, no_progress
from tureen.serving.inproc import InprocClient
from tureen.serving.streams import Streams
from tureen.types import Close, EngineInfo, FromEngine, Ready, ToEngine


@dataclass
class Faults:
    """How often things go wrong, as probabilities."""

    freeze: float = 0.0  # before a turn of the engine
    late: float = 0.0  # of a wake-up, between front and engine
    jump: float = 0.0  # of the clock, after a turn
    death: float = 0.0  # of the engine, in a turn
    leave: float = 0.0  # of a client, at some point of its answer
    stall: float = 0.0  # of a client that reads
    abort: float = 0.0


class _Inbox:
    """The engine's thread finds at once what was put in, but may be woken late."""

    def __init__(self, wake: Callable[[Callable[[], None]], None]) -> None:
        self._wake = wake
        self._messages: deque[ToEngine] = deque()
        self._news = asyncio.Event()

    def put(self, message: ToEngine) -> None:
        self._messages.append(message)
        self._wake(self._news.set)

    async def take(self, wait_s: float | None) -> list[ToEngine]:
        if not self._messages and wait_s != 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        self._news.clear()
        found = list(self._messages)
        self._messages.clear()
        return found


class SimulatedClient(InprocClient):
    """See EngineClient. `check` is called after each turn of the engine; what it raises is kept in `wrong`."""

    def __init__(
        self,
        make_engine: Callable[[Progress], tuple[Engine, EngineInfo]],
        loop: VirtualLoop,
        faults: Faults,
        chance: random.Random,
        check: Callable[[SimulatedClient], None],
    ) -> None:
        super().__init__(make_engine)
        self.num_turns = 0
        self.wrong: AssertionError | None = None  # what `check` found first
        self.wanted: set[str] = set()  # requests that somebody followed when the turn began
        self._virtual = loop
        self._faults = faults
        self._chance = chance
        self._check = check
        self._inbox: Any = _Inbox(self._wake)
        self._streams = Streams(self._inbox.put)
        self._event_loop: Any = self  # see call_soon_threadsafe
        self._ahead_s = 0.0  # what the step that runs has taken so far
        self._held: list[FromEngine] = []  # said in a turn whose time has not passed yet

    async def start(self, progress: Progress = no_progress) -> EngineInfo:
        self.engine, self.info = self._make_engine(progress)
        self._streams.receive(Ready(self.info))
        step = self.engine.step

        def timed_step() -> Any:
            self._ahead_s += self._chance.choice([0.001, 0.01, 0.03, 0.2])
            if self._chance.random() < self._faults.death:
                self._virtual.note("the engine dies")
                raise MemoryError("a scripted death")
            return step()

        self.engine.step = timed_step  # type: ignore[method-assign]
        self.loop = Loop(self.engine, lambda _: [], self._held.append, lambda: self._virtual.time() + self._ahead_s)
        self._driving = asyncio.create_task(self._drive())
        self._watcher = asyncio.create_task(self._watch())
        return self.info

    @property
    def has_work(self) -> bool:
        """Somebody waits, or something is on its way."""
        return bool(self._streams.is_waiting or self._outbox or self._inbox._messages or self.loop._live)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._inbox.put(Close())
        await self._driving
        self._drain()
        self._streams.fail("it was closed")

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._wake(callback)

    async def _drive(self) -> None:
        """What Loop.run does, over and over: take, turn."""
        try:
            while not self.loop._is_closed:
                messages = await self._inbox.take(self.loop._wait_s())
                if self._chance.random() < self._faults.freeze:
                    self._virtual.note("the engine freezes")
                    await asyncio.sleep(self._chance.choice([0.5, 2, 20]))
                self.wanted = set(self._streams._streams)
                messages += await self._inbox.take(0)
                for message in messages:
                    self.loop._handle(message)
                self.loop._turn()
                await self._catch_up()
        except Exception as error:  # noqa: BLE001 - an edge, as in Loop.run
            self.loop._fail(type(error).__name__)
            await self._catch_up()
        finally:
            self.engine.close()

    async def _catch_up(self) -> None:
        """Let the time pass that the turn took, then say what it has to say."""
        ahead_s, self._ahead_s = self._ahead_s, 0.0
        self.num_turns += 1
        try:
            self._check(self)
        except AssertionError as error:
            self.wrong = self.wrong or error
        await asyncio.sleep(ahead_s)
        if self._chance.random() < self._faults.jump:
            seconds = self._chance.choice([0.5, 5, 70])
            self._virtual.note(f"the clock jumps {seconds} s")
            self._virtual.clock.now_s += seconds
            self._virtual.clock.wall_offset_s += self._chance.choice([-7200, -1, 0, 3600])
        for message in self._held:
            self._publish(message)
        self._held.clear()

    def _wake(self, callback: Callable[[], None]) -> None:
        if self._chance.random() < self._faults.late:
            self._virtual.call_later(self._chance.choice([0.001, 0.05, 0.3]), callback)
        else:
            self._virtual.call_soon(callback)
