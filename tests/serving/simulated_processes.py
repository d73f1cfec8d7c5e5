"""Engines that run in the event loop as if each had a process, on a virtual clock: they are killed and stopped by
their number, at moments that the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
import timeouts
from memory_network import MemoryNetwork
from virtual_time import Clock, VirtualLoop, virtual_time

from tureen.api_workers import joining
from tureen.contract.types import Abort, Close, EngineFailed, EngineReady, FromEngine, StartupPhase, ToEngine
from tureen.data_parallel import engine_server, start
from tureen.engine.loop import Loop
from tureen.errors import TureenError
from tureen.sandbox import framing
from tureen.serving import process
from tureen.serving.child import PING, BuildOrder
from tureen.serving.door import Door, Guest
from tureen.serving.engine_socket import read_frame
from tureen.serving.watchdog import Sign

START_S, STEP_S = 0.2, 0.01
"""Seconds that an engine takes to start, and that a step takes."""

PATIENCE_S = 60.0
"""Seconds that a test waits for one thing, of the virtual clock."""


class Processes:
    """The engines of one test, by number, and the network between them and their fronts."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.all: dict[int, SimulatedProcess] = {}
        self.on_step: Callable[[int, int], None] = lambda pid, count: None
        """Is called after each step of an engine, before its report, with the number of steps so far."""
        self._numbers = itertools.count(101)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        self.network.install(patch)
        patch.setattr(timeouts, "PATIENCE_S", PATIENCE_S)
        for module in (start, process):
            patch.setattr(module, "ProcessHost", self.make)
        patch.setattr(joining, "state_of", lambda pid: "T" if self.all[pid].is_stopped else "S")
        patch.setattr(joining, "processor_s", lambda pid: self.all[pid].processor_s)
        patch.setattr(engine_server, "is_trusted", lambda _: True)

    def make(self, order: BuildOrder, receive: Callable[[FromEngine], None], lose: Any) -> SimulatedProcess:
        pid = next(self._numbers)
        self.all[pid] = SimulatedProcess(self, pid, order, receive, lose)
        return self.all[pid]

    def kill(self, pid: int) -> None:
        self.all[pid].end("the engine process was ended by SIGKILL")

    def stop(self, pid: int) -> None:
        self.all[pid].runs.clear()

    def go_on(self, pid: int) -> None:
        self.all[pid].runs.set()

    def is_alive(self, pid: int) -> bool:
        return not self.all[pid].is_over


class SimulatedProcess(process.ProcessHost):
    """A host like that of a process. `is_over`: it has ended, and says nothing more. `engine`: once it is built."""

    pid = 0
    engine: Any = None

    def __init__(
        self, processes: Processes, pid: int, order: BuildOrder, receive: Callable[[FromEngine], None], lose: Any
    ) -> None:
        self.pid = pid
        self.runs = asyncio.Event()
        self.runs.set()
        self.is_over = False
        self.processor_s = 0.0
        self.network = processes.network
        self._processes = processes
        self._order = order
        self._receive = receive
        self._lose = lose
        self._inbox: deque[ToEngine] = deque()
        self._news = asyncio.Event()
        self._door = MemoryDoor(order.door, self) if order.door else None
        self._num_steps = 0

    @property
    def is_stopped(self) -> bool:
        return not self.runs.is_set()

    async def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    def send(self, message: ToEngine) -> None:
        self._inbox.append(message)
        self._news.set()

    def admit(self) -> None:
        if self._door is not None:
            self._door.open()

    def sign(self) -> Sign:
        return Sign(not (self.is_stopped or self.is_over), self.processor_s, self.is_stopped)

    async def close(self, *, at_once: bool) -> None:
        if not at_once and not self.is_over:
            self.send(Close())
            await asyncio.wait([self._running])
        self.end("")
        await asyncio.gather(self._running, return_exceptions=True)

    def end(self, why: str) -> None:
        """Ends it at this moment: nothing more is said. `why`: as its front hears it, where that is news."""
        if not self.is_over:
            self.is_over = True
            if self._running is not asyncio.current_task():
                self._running.cancel()
            if self._door is not None:
                self._door.shut()
            if why:
                asyncio.get_running_loop().call_soon(self._lose, why)

    # ---- the engine

    async def _run(self) -> None:
        await asyncio.sleep(START_S)
        module, name = self._order.factory.split(":")
        try:
            engine, info = getattr(importlib.import_module(module), name)(
                self._order.config, progress=lambda *phase: self._say(StartupPhase(*phase))
            )
        except TureenError as error:
            self._say(EngineFailed(error.message, startup=True))
            return
        except Exception as error:  # noqa: BLE001 - as in tureen.serving.child
            self._say(EngineFailed(f"the engine could not be built: {type(error).__name__}", startup=True))
            return
        self.engine = engine
        engine.rows._runner._step_s = 0.0  # it is the virtual clock that a step takes time of
        loop = Loop(engine, lambda _: [], self._say, time.monotonic)
        self._say(EngineReady(info))
        try:
            while not (loop._is_closed or self.is_over):
                await self._turn(loop, engine)
        except RuntimeError as error:
            loop._fail(type(error).__name__)
            self.end("the engine process ended with status 0")
        finally:
            engine.close()
        self.is_over = True

    async def _turn(self, loop: Loop, engine: Any) -> None:
        await self.runs.wait()
        self._news.clear()
        while self._inbox:
            loop._handle(self._inbox.popleft())
        if engine.has_work:
            self.processor_s += STEP_S / 2
            await asyncio.sleep(STEP_S)
            await self.runs.wait()
            self._num_steps += 1
            self._processes.on_step(self.pid, self._num_steps)
        wait_s = loop._turn()
        if not (self._inbox or wait_s == 0 or loop._is_closed):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)

    def _say(self, message: FromEngine) -> None:
        if not self.is_over:
            self._receive(message if self._door is None else self._door.share(message))


class MemoryGuest(Guest):
    """A front at a door, over a connection in memory."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.request_ids = set()
        self.unheard: deque[bytes] = deque()
        self._writer = writer

    def send(self, payload: bytes) -> None:
        self._writer.write(framing.framed(payload))

    def receive(self) -> bytes | None:
        return self.unheard.popleft() if self.unheard else None

    def close(self) -> None:
        self._writer.close()


class MemoryDoor(Door):
    """The door of such a process."""

    def __init__(self, path: str, host: SimulatedProcess) -> None:
        super().__init__(path, host.send)
        self._host = host

    def open(self) -> None:
        self._host.network.listen(self._path, self._take, pid=self._host.pid)

    def shut(self) -> None:
        listeners = self._host.network.listeners
        if self._path in listeners and listeners[self._path][2] == self._host.pid:
            del listeners[self._path]
        for guest in self._guests.values():
            guest.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_guests += 1
        guest = self._guests[str(self._num_guests)] = MemoryGuest(self._num_guests, writer)
        guest.send(self._ready)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                guest.unheard.append(await read_frame(reader, framing.ANY_SIZE))
                if guest.unheard[-1] == PING:
                    await self._host.runs.wait()
                self._listen_to(guest)
        del self._guests[str(guest.number)]
        for request_id in tuple(guest.request_ids):
            self._put(Abort(guest.id_of(request_id)))


def play(scenario: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **how: Any) -> Any:
    """Runs a scenario on a virtual clock, in the usual order of work. Returns what it returns."""
    clock, chance = Clock(), Random(1)
    with virtual_time(clock, chance):
        loop = VirtualLoop(clock, chance)
        loop._ready.draw = lambda count: 0
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(scenario(*args, **how))
