"""A supervisor without processes: each worker answers in the thread that asks it, with the program's own code.

`use` has a module's pools take it. A test scripts what only a process can do. A handler that returns None hangs: its
time is over as soon as it is waited for. One that raises Lost ends its worker. `lose` ends a worker, `end_fork_server`
all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence

from timeouts import PATIENCE_S

from tureen.sandbox.fork_server import Program
from tureen.sandbox.framing import MAX_MESSAGE_BYTES
from tureen.sandbox.worker import Lost

FIRST_PID = 1 << 23
"""Above every process id that Linux gives: no signal can reach a process by mistake."""

ENDED = "it ended its process, or exceeded its memory or time"
OUTSIDE = "its process was killed"

Handle = Callable[[bytes], bytes | None]
Open = Callable[[Sequence[int]], Handle]

_pids = itertools.count(FIRST_PID)
_at_work = threading.local()


def ended_by_itself() -> Lost:
    return Lost(ENDED, has_begun=True)


def ended_from_outside() -> Lost:
    return Lost(OUTSIDE, has_begun=True, is_outside=True)


def too_late() -> Lost:
    return Lost("it did not answer in time", has_begun=True, is_late=True)


def orphaned() -> Lost:
    return Lost(ENDED, has_begun=True, is_blameless=True)


def at_work() -> InlineWorker:
    """Return the worker whose code runs in this thread."""
    worker: InlineWorker = _at_work.worker
    return worker


def wait_until_lost() -> None:
    """Hold up the worker of this thread until it is ended."""
    wait_for(threading.Event())


def wait_for(event: threading.Event) -> None:
    """Hold up the worker of this thread until the event, or until it is ended."""
    worker = at_work()
    worker.wakes.append(event)
    if not worker.is_lost:
        assert event.wait(PATIENCE_S)


class InlineWorker:
    """In place of tureen.sandbox.worker.Worker. Its processor time is the time for which it was waited for in vain."""

    def __init__(self, handle: Handle) -> None:
        self.pid = next(_pids)
        self.has_begun = False
        self.idle_since_s: float | None = None
        self.is_killed = False
        self.cpu_s = 0.0
        self.memory_bytes = 0
        self.is_lost = False
        self.reason: Callable[[], Lost] = ended_by_itself
        self.wakes: list[threading.Event] = []
        self._handle = handle
        self._reply: bytes | None = None
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def is_alive(self) -> bool:
        return not self.is_lost

    def begin(self, until_s: float) -> None:
        if self.is_lost and not self.has_begun:
            raise Lost("it was not started", is_blameless=True)
        self.has_begun = True

    def call(self, *parts: bytes, timeout_s: float) -> bytes:
        self.begin(timeout_s)
        self.send(*parts, until_s=timeout_s)
        return self.receive(timeout_s)

    def send(self, *parts: bytes, until_s: float) -> None:
        if self.is_lost:
            raise self.reason()
        _at_work.worker = self
        try:
            self._reply = self._handle(b"".join(parts))
        except Lost as lost:
            self.lose(lambda lost=lost: lost)
        self._set_readable()

    def receive(self, until_s: float, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        if self.is_lost:
            raise self.reason()
        os.eventfd_read(self._ready)
        reply, self._reply = self._reply, None
        if reply is None:
            raise too_late()
        if len(reply) > max_bytes:
            raise Lost(f"a message of {len(reply)} bytes", has_begun=True)
        return reply

    def answer_with(self, handle: Handle) -> None:
        """Have it answer otherwise from now on."""
        self._handle = handle

    def fileno(self) -> int:
        return self._ready

    def wait_readable(self, timeout_s: float) -> bool:
        if self._reply is None and not self.is_lost:
            self.cpu_s += timeout_s
            return False
        return True

    def lose(self, reason: Callable[[], Lost]) -> None:
        """End it. Whoever sends to it, or waits for its reply, gets this reason."""
        if not self.is_lost:
            self.reason, self.is_lost = reason, True
            for event in self.wakes:
                event.set()
            self._set_readable()

    def kill(self) -> None:
        self.is_killed = True
        self.lose(ended_by_itself)

    def close(self) -> None:
        self.kill()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def _set_readable(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            os.eventfd_write(self._ready, 1)


class InlineSupervisor:
    """In place of tureen.sandbox.supervisor.Supervisor."""

    def __init__(self, name: str, open_: Open, tick: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.condition = "off"
        self.pid = 0
        self.num_replaced = 0
        self.can_start = True
        self.workers: list[InlineWorker] = []
        self._open = open_
        self._tick = tick

    @property
    def is_down(self) -> bool:
        return self.num_replaced > 0 and self.condition == "starting"

    def start(self) -> None:
        if self.condition == "off":
            self.condition = "starting"

    def share(self, budget: object) -> None:
        pass

    def wait_ready(self, timeout_s: float) -> bool:
        self.start()
        if self.condition == "starting" and self.can_start:
            self.condition, self.pid = "ready", next(_pids)
        return self.condition == "ready"

    def fork(self, descriptors: Sequence[int] = ()) -> InlineWorker:
        if self.condition != "ready":
            raise Lost(f"the process that starts {self.name} is being replaced; try again", is_blameless=True)
        worker = InlineWorker(self._open(descriptors))
        self.workers.append(worker)
        return worker

    def end(self, worker: InlineWorker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
        worker.close()

    def end_fork_server(self) -> None:
        """Lose the fork server with all its workers; the next one that waits gets another."""
        self.condition, self.num_replaced = "starting", self.num_replaced + 1
        for worker in list(self.workers):
            worker.lose(orphaned)

    def close(self) -> None:
        self.condition = "closed"
        for worker in list(self.workers):
            worker.kill()


def use(monkeypatch: object, module: str, make_program: Callable[[bytes], Program]) -> None:
    """Have the module's pools start no process from now on."""

    def make(name: str, program: str, limits: object, *, setup: bytes = b"", tick=lambda: None) -> InlineSupervisor:
        return InlineSupervisor(name, make_program(setup).open, tick)

    monkeypatch.setattr(f"{module}.Supervisor", make)  # type: ignore[attr-defined]
