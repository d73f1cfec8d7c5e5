"""Hosts whose engines are stepped by a task, at times drawn from a seed: what a process does, until it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from virtual_time import VirtualLoop

from tureen.contract.types import Close, EngineFailed, EngineInfo, EngineReady, EngineRole, FromEngine, ToEngine
from tureen.data_parallel.replica import OnTurn, ReplicaClient
from tureen.engine.engine import Engine
from tureen.engine.loop import Loop
from tureen.log import Progress, no_progress
from tureen.serving.healing import HealingClient
from tureen.serving.watchdog import Sign

WATCHDOG_S, FREEZE_GRACE_S = 30.0, 5.0


@dataclass
class Faults:
    """How often things go wrong, as probabilities."""

    freeze: float = 0.0  # of an engine, before a turn
    late: float = 0.0  # of a wake-up, between front and engine
    jump: float = 0.0  # of the clock, after a turn
    death: float = 0.0  # of an engine, in a turn
    false_start: float = 0.0  # of an engine that replaces another
    leave: float = 0.0  # of a client, at some point of its answer
    stall: float = 0.0  # of a client that reads
    abort: float = 0.0


class _Inbox:
    """The engine finds at once what was sent, but may be woken late."""

    def __init__(self, wake: Callable[[Callable[[], None]], None]) -> None:
        self._wake = wake
        self._messages: deque[ToEngine] = deque()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: ToEngine) -> None:
        self._messages.append(message)
        self._wake(self._news.set)

    async def wait(self, wait_s: float | None) -> None:
        if not self._messages and wait_s != 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    def take(self) -> list[ToEngine]:
        self._news.clear()
        found = list(self._messages)
        self._messages.clear()
        return found


class Surroundings:
    """What all hosts of one engine share, those too that replace others. `check` is called after each turn; what it
    raises first is `wrong`."""

    def __init__(
        self,
        make_engine: Callable[[Progress], tuple[Engine, EngineInfo]],
        loop: VirtualLoop,
        faults: Faults,
        chance: random.Random,
        check: Callable[[SimulatedHost], None],
    ) -> None:
        self.make_engine = make_engine
        self.loop = loop
        self.faults = faults
        self.chance = chance
        self.wrong: AssertionError | None = None
        self.hosts: list[SimulatedHost] = []
        self._check = check

    def connect(self) -> HealingClient:
        self.client = HealingClient(self._make_host, watchdog_timeout_s=WATCHDOG_S, freeze_grace_s=FREEZE_GRACE_S)
        return self.client

    def connect_replica(self, role: EngineRole, on_turn: OnTurn) -> ReplicaClient:
        """Returns the client of one replica; see Router.start."""
        self.client = ReplicaClient(
            self._make_host, on_turn, watchdog_timeout_s=WATCHDOG_S, freeze_grace_s=FREEZE_GRACE_S
        )
        self.client.role = role
        return self.client

    def _make_host(
        self, epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]
    ) -> SimulatedHost:
        self.hosts.append(SimulatedHost(self, epoch, receive, lose))
        return self.hosts[-1]

    @property
    def wanted(self) -> set[str]:
        """Requests that somebody follows."""
        return set(self.client._streams._streams)

    def check(self, host: SimulatedHost) -> None:
        try:
            self._check(host)
        except AssertionError as error:
            self.wrong = self.wrong or error

    def wake(self, callback: Callable[[], None]) -> None:
        if self.chance.random() < self.faults.late:
            self.loop.call_later(self.chance.choice([0.001, 0.05, 0.3]), callback)
        else:
            self.loop.call_soon(callback)


class SimulatedHost:
    """See Host. What it has said reaches the front even after its end, as from a socket, and in order."""

    can_be_killed = True

    def __init__(
        self, around: Surroundings, epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]
    ) -> None:
        self.epoch = epoch
        self.num_turns = 0
        self.is_frozen = self.is_over = False
        self.around = around
        self.wanted: set[str] = set()  # requests that somebody followed when the turn began
        self._receive = receive
        self._lose = lose
        self._inbox = _Inbox(around.wake)
        self._outbox: deque[FromEngine | str] = deque()  # a text: why it is lost
        self._ahead_s = 0.0  # what the turn that runs has taken so far
        self._wait_s: float | None = 0.0  # as Loop.run has it
        self._held: list[FromEngine] = []  # said in a turn whose time has not passed yet
        self._processor_s = 0.0

    async def start(self) -> None:
        if self.epoch > 1 and self.around.chance.random() < self.around.faults.false_start:
            self._note("does not start")
            if self.around.chance.random() < 0.5:
                raise OSError(12, "Cannot allocate memory")
            self._say(EngineFailed("the model is not there any more", startup=True))
            return
        self._running = asyncio.create_task(self._run())

    def send(self, message: ToEngine) -> None:
        if not self.is_over:
            self._inbox.put(message)

    def sign(self) -> Sign:
        return Sign(not (self.is_frozen or self.is_over), self._processor_s, self.is_frozen)

    async def close(self, *, at_once: bool) -> None:
        if at_once:
            self.is_over = True
        else:
            self._inbox.put(Close())
        running = getattr(self, "_running", None)
        if running is not None:
            if at_once:
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        self._drain()

    @property
    def is_idle(self) -> bool:
        return not (self._inbox or self._outbox or self.loop._live)

    # ---- the engine

    async def _run(self) -> None:
        around = self.around
        await asyncio.sleep(around.chance.choice([0, 0.1, 3]) if self.epoch > 1 else 0)
        self.engine, info = around.make_engine(no_progress)
        step = self.engine.step

        def timed_step() -> Any:
            self._ahead_s += around.chance.choice([0.001, 0.01, 0.03, 0.2])
            self._processor_s += 0.001
            if around.chance.random() < around.faults.death:
                raise MemoryError("a scripted death")
            return step()

        self.engine.step = timed_step  # type: ignore[method-assign]
        self.loop = Loop(self.engine, lambda _: [], self._held.append, lambda: around.loop.time() + self._ahead_s)
        self._say(EngineReady(info))
        try:
            while not self.loop._is_closed:
                await self._turn()
        except MemoryError:
            self.is_over = True
            self._note("dies")
            if around.chance.random() < 0.5:
                self._held.clear()  # killed: what it was about to say, nobody hears
            self._speak()
            self._say("it ended")
        finally:
            self.engine.close()

    async def _turn(self) -> None:
        """What Loop.run does, over and over: take, turn. What it says comes when the time that it took has passed."""
        around = self.around
        await self._inbox.wait(self._wait_s)
        if around.chance.random() < around.faults.freeze:
            await self._freeze()
        self.wanted = around.wanted
        for message in self._inbox.take():
            self.loop._handle(message)
        self._wait_s = self.loop._turn()
        ahead_s, self._ahead_s = self._ahead_s, 0.0
        self.num_turns += 1
        around.check(self)
        await asyncio.sleep(ahead_s)
        if around.chance.random() < around.faults.jump:
            self._jump()
        self._speak()

    async def _freeze(self) -> None:
        self._note("freezes")
        self.is_frozen = True
        try:
            await asyncio.sleep(self.around.chance.choice([0.5, 2, 20]))
        finally:
            self.is_frozen = False

    def _jump(self) -> None:
        """All processes were stopped for a while, and somebody has set the clock."""
        chance, clock = self.around.chance, self.around.loop.clock
        seconds = chance.choice([0.5, 5, 70, 4000])
        self.around.loop.note(f"the clock jumps {seconds} s")
        clock.now_s += seconds
        clock.wall_offset_s += chance.choice([-7200, -1, 0, 3600])

    def _speak(self) -> None:
        for message in self._held:
            self._say(message)
        self._held.clear()

    def _say(self, message: FromEngine | str) -> None:
        """One wake-up of the front for all that has gathered."""
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self.around.wake(self._drain)

    def _drain(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, str):
                self._lose(message)
            else:
                self._receive(message)

    def _note(self, what: str) -> None:
        self.around.loop.note(f"engine {self.epoch} {what}")
