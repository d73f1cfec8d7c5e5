"""Keeps one fork server running: watches it from a thread of its own, and replaces it when it dies or hangs."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from tureen.log import get_logger
from tureen.sandbox import seccomp
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.fork_server import ENDED, FORK, PING, READY
from tureen.sandbox.heartbeat import Patience, Pulse
from tureen.sandbox.limits import WorkerLimits
from tureen.sandbox.worker import Lost, Worker, readable

TICK_S = 0.25
STARTING = Patience(cpu_s=60.0, idle_s=120.0)  # it imports, on a machine that may be busy
SERVING = Patience()
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Seconds before a fork server that never became ready is started again: at first, and after many attempts."""

CLOSE_TIMEOUT_S = 5.0
RESERVED_SHARE = 0.25
"""The share of a worker's memory limit that is reserved at its start, where memory has a budget."""

ENVIRONMENT = {"PATH": os.defpath} | dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""A fork server must have no threads; libraries in a sealed worker that mean to start some would wait for them."""

NEEDED = ((os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal"), (socket, "SOCK_SEQPACKET"))
"""The calls without which there are no helper processes: macOS has none of them."""

Condition = Literal["off", "starting", "ready", "suspect", "closed"]

log = get_logger("sandbox")

_numbers = itertools.count(1)
"""Numbers the workers of all supervisors."""


def why_no_helpers() -> str:
    """Says why this system can have no helper processes; empty where it can."""
    missing = [name for module, name in NEEDED if not hasattr(module, name)]
    return f"it needs helper processes, which this system lacks ({', '.join(missing)} missing)" if missing else ""


class Supervisor:
    """Supervises one fork server, whichever process it is at the moment.

    Any thread may call it; only wait_ready waits.
    """

    def __init__(
        self,
        name: str,
        program: str,
        limits: WorkerLimits,
        *,
        setup: bytes = b"",
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """program: a module, or the absolute path of a file. limits: those of its workers. setup: what the program
        gets. tick: called often, by the watching thread."""
        if limits.is_sealed and not seccomp.is_supported():
            log.warning(
                "%s run without a seccomp filter, which needs Linux on %s. Their other limits hold, but an exploited "
                "worker could act as this user. Serve only clients that you trust",
                name,
                " or ".join(seccomp.ARCHITECTURES),
            )
        self.name = name
        self.num_replaced = 0
        self._program = program
        self._limits = limits
        self._setup = setup
        self._budget: MemoryBudget | None = None
        self._tick = tick
        self._changed = threading.Condition()
        self._condition: Condition = "off"
        self._has_been_ready = False
        self._closing = threading.Event()
        self._server: _Server | None = None
        self._workers: dict[Worker, int] = {}  # with the number that the fork server knows it by
        self._stopped: dict[Worker, float] = {}  # since when
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake = os.pipe()

    @property
    def condition(self) -> Condition:
        """The state of the fork server, from `off` to `closed`."""
        return self._condition

    @property
    def is_down(self) -> bool:
        """Says whether the fork server was ready once and is not now: it is being replaced, or does not answer."""
        return self._has_been_ready and self._condition in ("starting", "suspect")

    @property
    def pid(self) -> int:
        """The process id of the fork server; 0 = there is none at the moment."""
        server = self._server
        return 0 if server is None else server.process.pid

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers)

    def start(self) -> None:
        """Starts the watching thread, which starts the fork server. Where the system has no thread to spare, the next
        call tries again."""
        with self._changed:
            if self._condition != "off":
                return
            thread = threading.Thread(target=self._run, name=f"watch-{self.name}", daemon=True)
            self._condition = "starting"
            try:
                thread.start()
            except RuntimeError:
                self._condition = "off"
                log.error("the process that starts %s cannot be watched: the system starts no thread", self.name)
                return
            self._thread = thread

    def share(self, budget: MemoryBudget) -> None:
        """Counts the workers' memory for this budget from now on."""
        self._budget = budget
        budget.add(self)

    def wait_ready(self, timeout_s: float) -> bool:
        """Starts the fork server if need be, and waits until it can fork. Returns False after `timeout_s`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._condition in ("ready", "closed", "off"), timeout_s)
            return self._condition == "ready"

    def fork(self, descriptors: Sequence[int] = ()) -> Worker:
        """Forks a worker, which gets these descriptors. Waits where memory is short.

        Raises Lost where there is no fork server now.
        """
        budget = self._budget
        if budget is None:
            return self._fork(descriptors)
        reservation = budget.reserve(int(RESERVED_SHARE * self._limits.memory_bytes))
        if reservation is None:
            raise Lost(f"there is no memory for another of {self.name}; try again", is_blameless=True)
        try:
            reservation.worker = worker = self._fork(descriptors)
            return worker
        except Lost:
            budget.release(None, reservation)
            raise

    def _fork(self, descriptors: Sequence[int]) -> Worker:
        """Raises Lost."""
        with self._changed:
            server = self._server
            if server is None or self._condition != "ready":
                raise Lost(f"the process that starts {self.name} is being replaced; try again", is_blameless=True)
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise Lost(f"no worker of {self.name} can be started: {error.strerror}", is_blameless=True) from None
            number = next(_numbers)
            with theirs:
                try:
                    socket.send_fds(server.control, [FORK.pack(number)], [theirs.fileno(), *descriptors])
                except OSError:
                    ours.close()
                    self._condition = "suspect"  # until the watching thread knows more
                    raise Lost(f"the process that starts {self.name} does not answer", is_blameless=True) from None
            worker = Worker(ours, self._limits, lambda: not server.is_alive)
            self._workers[worker] = number
            return worker

    def end(self, worker: Worker) -> None:
        """Ends a worker that is not needed and whose reply no caller waits for."""
        with self._changed:
            self._workers.pop(worker, None)
            self._stopped.pop(worker, None)
        worker.close()
        if self._budget is not None:
            self._budget.release(worker)

    def close(self) -> None:
        """Ends the fork server with all its workers. Who waits for a worker is told that it is lost."""
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._condition = "closed"
            self._changed.notify_all()
        for worker in self.workers:
            worker.kill()
        os.write(self._wake, b"x")
        if self._thread is not None:
            self._thread.join()
        if self._budget is not None:
            self._budget.discard(self)
        os.close(self._wake)
        os.close(self._wake_read)

    def _run(self) -> None:
        """Starts, watches and replaces the fork server."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            server = None
            try:
                server = self._server = _Server(self._program, self._setup)
                self._watch(server)
            except OSError as error:
                log.error("the process that starts %s cannot be started: %s", self.name, error.strerror)
            finally:
                was_ready = self._enter("starting") in (
                    "ready",
                    "suspect",
                )  # first, so that no caller forks from an ended server
                self._server = None
                if server is not None:
                    server.reap(is_orderly=self._closing.is_set())
            if self._closing.is_set():
                break
            self.num_replaced += 1
            log.warning("the process that starts %s ended; another one is started", self.name)
            pause_s = 0.0 if was_ready else min(2 * max(pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if pause_s:
                readable(pause_s, self._wake_read)

    def _watch(self, server: _Server) -> None:
        """Watches a fork server; returns when it must be replaced, or at close."""
        pulse = Pulse(STARTING)
        asked_s = time.monotonic()
        pulse.ask(asked_s, server.cpu_s)
        while True:
            control = server.control.fileno()
            awake = readable(TICK_S, control, server.death, self._wake_read)
            if self._closing.is_set() or server.death in awake:
                return
            if control in awake:
                said = server.heard()
                if not said:
                    return
                if said == READY:
                    pulse.answer()
                    if self._enter("ready") == "starting":
                        pulse = Pulse(SERVING)
                else:
                    self._note_end(*ENDED.unpack(said))
                    continue
            now_s = time.monotonic()
            verdict = pulse.judge(now_s, server.cpu_s, is_stopped=is_stopped(server.process.pid))
            if verdict == "hung":
                return
            if verdict == "suspect" and self._condition == "ready":
                self._enter("suspect")
            if not pulse.is_waiting and now_s - asked_s >= TICK_S and server.ask():
                asked_s = now_s
                pulse.ask(now_s, server.cpu_s)
            self._look_after_workers(now_s)

    def _look_after_workers(self, now_s: float) -> None:
        """Ends workers that are stopped, and those that there is no memory for; then calls the user's tick."""
        for worker in self.workers:
            if not worker.pid or not is_stopped(worker.pid):
                self._stopped.pop(worker, None)
            elif now_s - self._stopped.setdefault(worker, now_s) >= SERVING.stopped_s:
                worker.was_stopped = True
                worker.kill()
        if self._budget is not None:
            self._budget.enforce()
        self._tick()

    def _note_end(self, number: int, status: int) -> None:
        with self._changed:
            worker = next((each for each, its in self._workers.items() if its == number), None)
        if worker is not None:
            worker.note_end(status)

    def _enter(self, condition: Condition) -> Condition:
        """Sets the condition; returns the one before."""
        with self._changed:
            before = self._condition
            if not self._closing.is_set():
                self._condition = condition
            self._has_been_ready = self._has_been_ready or condition == "ready"
            self._changed.notify_all()
            return before


def helpers_down(*supervisors: Supervisor | None) -> tuple[str, ...]:
    """Returns the names of the helpers that are being replaced, in words."""
    return tuple(each.name for each in supervisors if each is not None and each.is_down)


class _Server:
    """One process. Closing the control socket ends it."""

    def __init__(self, program: str, setup: bytes) -> None:
        """Raises OSError."""
        from tureen.sandbox import child_process  # noqa: PLC0415 - many servers never start a helper

        with contextlib.ExitStack() as undo:
            self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self.control.close)
            undo.callback(theirs.close)
            self.control.setblocking(False)
            memory = os.memfd_create("tureen-setup")
            undo.callback(os.close, memory)
            with open(memory, "wb", closefd=False) as file:
                file.write(setup)
            self.process = child_process.start(
                program,
                str(theirs.fileno()),
                str(memory),
                pass_fds=[theirs.fileno(), memory],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=ENVIRONMENT,
                process_group=0,  # a Ctrl-C is for the server, which drains first
            )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            self.death = os.pidfd_open(self.process.pid)
            undo.pop_all()
        theirs.close()
        os.close(memory)

    @property
    def is_alive(self) -> bool:
        """Says whether the server is alive. Its socket closes before its workers are ended, its end shows after that:
        the first sign counts."""
        if self.process.returncode is not None or self.control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self.control, 0)  # that the other side has closed it is always told
        return not poll.poll(0)

    @property
    def cpu_s(self) -> float:
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime(~self.process.pid << 3 | 2)
        return 0.0

    def heard(self) -> bytes:
        """Returns what the server said, READY or an ENDED; nothing where it is gone."""
        with contextlib.suppress(OSError):
            return self.control.recv(ENDED.size)
        return b""

    def ask(self) -> bool:
        with contextlib.suppress(OSError):  # it takes nothing: it will be looked at again
            return self.control.send(PING) == 1
        return False

    def reap(self, *, is_orderly: bool) -> None:
        """Ends the server and frees what belongs to it. is_orderly: it may end its workers first."""
        self.control.close()
        try:
            if not is_orderly:
                self.process.kill()
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            os.close(self.death)


def is_stopped(pid: int) -> bool:
    """Says whether a process is stopped, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b") ", 1)[1][:1] in b"Tt"
    except (OSError, IndexError):
        return False
