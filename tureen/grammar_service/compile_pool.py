"""Workers that compile: each compile has one to itself, in a thread that waits for it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tureen.grammar.base import WARM_UP, GrammarSpec
from tureen.grammar_service.messages import LIMITS, MAX_REPLY_BYTES, CompileReply, invalid_code
from tureen.sandbox.limits import address_space
from tureen.sandbox.supervisor import Supervisor
from tureen.sandbox.worker import Lost, Worker

PROGRAM = "tureen.grammar_service.compile_worker"
START_TIMEOUT_S = 120.0
MAX_IDLE = 2
MAX_GROWTH_BYTES = 64 << 20
IDLE_S = 60.0
"""Seconds for which an idle worker is kept; the last one stays for as long as the server."""

LOWER_AFTER_S = 0.05
"""A worker that takes more processor time comes after others from then on, and gets its share all the same."""
LOWER_BY = 5  # of nice(2)
IDLE_AFTER_S = 2.0
"""A worker that takes more, as no real schema does, gets only memory that no other worker wants from then on."""
LOOK_S = 0.25  # between looks at how much a worker has taken


class Task:
    """One compile. `reply` stays None where the worker was lost; `is_blameless`: not because of the constraint;
    `is_outside`: somebody else ended it."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.is_over = False
        self.has_begun = False  # a worker was there for it
        self.is_blameless = self.is_outside = False
        self.reply: CompileReply | None = None
        self.is_ended = False  # no request waits for it any more
        self._worker: Worker | None = None
        self._first_cpu_s = self._last_cpu_s = 0.0

    def end(self) -> None:
        """No request waits for it any more."""
        self.is_ended = True
        worker = self._worker
        if worker is not None and not self.is_over:
            worker.kill()

    @property
    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        if self._worker is not None and not self.is_over:
            self._last_cpu_s = max(self._last_cpu_s, self._worker.cpu_s - self._first_cpu_s)
        return self._last_cpu_s

    def note_end(self) -> None:
        """The worker computes for it no more."""
        self._last_cpu_s = self.cpu_s
        self.is_over = True

    def use(self, worker: Worker) -> None:
        self._first_cpu_s = worker.cpu_s
        self._worker = worker
        self.has_begun = True
        if self.is_ended:
            worker.kill()


class CompilePool:
    """The workers; one at least waits in advance while none compiles."""

    def __init__(self, setup: bytes, max_tasks: int) -> None:
        """Does not wait. Raises OSError, RuntimeError where the system has nothing to do so with."""
        self.supervisor = Supervisor("the workers that compile", PROGRAM, LIMITS, setup=setup, tick=self._end_idle)
        self._threads = ThreadPoolExecutor(max_tasks + 1, "compile-grammar")
        self._lock = threading.Lock()
        self._idle: dict[Worker, int] = {}  # with the size of the address space that each had at first
        self._is_closed = False
        self.supervisor.start()
        try:
            self._threads.submit(self._keep_spare)
        except RuntimeError:
            self.supervisor.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether a compile would begin at once."""
        return bool(self._idle) or self.supervisor.condition == "ready"

    def compile(self, spec: bytes) -> Task:
        """Begin with a GrammarSpec, encoded. Does not wait. Raises RuntimeError where the system starts no thread."""
        task = Task()
        try:
            self._threads.submit(self._run, task, spec)
        except RuntimeError:
            task.end()  # the pool keeps what it could not begin
            raise
        return task

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        self.supervisor.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self.supervisor.workers:
            self.supervisor.end(worker)

    def _run(self, task: Task, spec: bytes) -> None:
        if task.is_ended:
            return
        worker = None
        try:
            worker, first_bytes = self._take()
            task.use(worker)
            reply, is_quick = _ask(worker, spec)
            task.reply = reply
            if is_quick and _is_sound(reply, spec) and _has_grown_little(worker, first_bytes):
                self._give_back(worker, first_bytes)
                worker = None
        except Lost as lost:
            task.is_blameless, task.is_outside = lost.is_blameless, lost.is_outside
        except msgspec.DecodeError:
            pass  # it answers nonsense
        finally:
            task.note_end()
            if worker is not None:
                self.supervisor.end(worker)
            self._keep_spare()

    def _take(self) -> tuple[Worker, int]:
        """Raises Lost."""
        with self._lock:
            while self._idle:
                worker, first_bytes = self._idle.popitem()
                worker.idle_since_s = None
                if worker.is_alive:
                    return worker, first_bytes
                self.supervisor.end(worker)
        return self._make(b"")

    def _make(self, first: bytes) -> tuple[Worker, int]:
        """A worker, which has compiled `first` where that is not empty. Raises Lost."""
        if not self.supervisor.wait_ready(START_TIMEOUT_S):
            raise Lost("no worker could be started", is_blameless=True)
        worker = self.supervisor.fork()
        try:
            worker.begin(time.monotonic() + START_TIMEOUT_S)
            if first:
                worker.call(first, timeout_s=START_TIMEOUT_S)
            return worker, address_space(worker.pid)
        except OSError as error:
            self.supervisor.end(worker)
            raise Lost(f"its size cannot be read: {error.strerror}", is_blameless=True) from None
        except BaseException:
            self.supervisor.end(worker)
            raise

    def _give_back(self, worker: Worker, first_bytes: int) -> None:
        with self._lock:
            worker.idle_since_s = time.monotonic()
            self._idle[worker] = first_bytes

    def _keep_spare(self) -> None:
        if self._idle or self._is_closed:
            return
        with contextlib.suppress(Lost):
            self._give_back(*self._make(msgspec.msgpack.encode(WARM_UP)))

    def _end_idle(self) -> None:
        """One idle worker is kept, others for a while."""
        with self._lock:
            old_s = time.monotonic() - IDLE_S
            ended = [worker for worker in self._idle if not worker.is_alive]
            alive = [worker for worker in self._idle if worker not in ended]
            ended += alive[:-MAX_IDLE] + [
                worker for worker in alive[-MAX_IDLE:-1] if (worker.idle_since_s or old_s) < old_s
            ]
            for worker in ended:
                del self._idle[worker]
                self.supervisor.end(worker)


def _ask(worker: Worker, spec: bytes) -> tuple[CompileReply, bool]:
    """The reply, and whether it was quick: else others go first from some moment on. Raises Lost, DecodeError."""
    start_cpu_s = worker.cpu_s
    worker.send(spec, until_s=time.monotonic() + LIMITS.cpu_s)
    is_quick = not _is_waited_for(worker, start_cpu_s + LOWER_AFTER_S, LOWER_AFTER_S)
    if not is_quick:
        _lower(worker.pid)
        if _is_waited_for(worker, start_cpu_s + IDLE_AFTER_S, LOOK_S):
            _make_idle(worker.pid)
    return msgspec.msgpack.decode(worker.receive(math.inf, MAX_REPLY_BYTES), type=CompileReply), is_quick


def _is_waited_for(worker: Worker, until_cpu_s: float, look_s: float) -> bool:
    """Waits for the reply; True when the worker has taken so much processor time before."""
    while not worker.wait_readable(look_s):
        if worker.cpu_s >= until_cpu_s:
            return True
    return False


def _has_grown_little(worker: Worker, first_bytes: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or cannot be looked at
        return address_space(worker.pid) < first_bytes + MAX_GROWTH_BYTES
    return False


def _is_sound(reply: CompileReply, spec: bytes) -> bool:
    """Whether the worker that says so can be used again."""
    return reply.failure is None or reply.failure.code == invalid_code(msgspec.msgpack.decode(spec, type=GrammarSpec))


def _lower(pid: int) -> None:
    for thread in _threads(pid):
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOWER_BY)


def _make_idle(pid: int) -> None:
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            try:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            except PermissionError:  # some sandboxes allow nice(2) only
                os.setpriority(os.PRIO_PROCESS, thread, 19)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # it has ended
        return []
