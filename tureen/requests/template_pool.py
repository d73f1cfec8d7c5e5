"""Renders chat templates in processes that can be ended: a template comes with a model's files, and a single operation
of it can compute for ever without a chance to look at a clock."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Final

from tureen.errors import Unavailable
from tureen.log import get_logger
from tureen.requests.template_worker import LIMITS
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import Supervisor, why_no_helpers
from tureen.sandbox.worker import Lost, Worker
from tureen.text.template_jobs import LIMIT, MAX_ANSWER_BYTES, do_job

PROGRAM = "tureen.requests.template_worker"
MAX_WORKERS: Final = 3
MAX_ATTEMPTS: Final = 3  # where the worker is ended from outside, or the process that forks it
WAIT_S: Final = 60.0  # for a worker, and for its answer; what a worker may compute is limited by CPU time
SMALL_BYTES: Final = 64 << 10  # of a job; a socket takes so many without waiting

log = get_logger("chat")


class TemplatePool:
    """The worker processes of all chat templates of this process. They start when first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[Worker] = []
        self._num_used = 0
        self._has_budget = False
        self.supervisor = Supervisor("the workers that render chat templates", PROGRAM, LIMITS)

    def share(self, budget: MemoryBudget) -> None:
        """Counts the workers' memory for this budget, unless it is counted for another server's already."""
        if not self._has_budget:
            self._has_budget = True
            self.supervisor.share(budget)

    def do(self, job: bytes) -> bytes:
        """Returns the answer to a job. Any thread may call it; it waits.

        Raises Unavailable when no worker could be had, or got to run.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                worker = self._take()
            except Lost:
                continue
            try:
                worker.begin(time.monotonic() + WAIT_S)
                worker.send(job, until_s=time.monotonic() + WAIT_S)
                answer = worker.receive(time.monotonic() + WAIT_S, MAX_ANSWER_BYTES)
            except Lost as lost:
                self._drop(worker)
                if not (lost.is_outside or lost.is_blameless):
                    return _answer_for(lost)
            except BaseException:
                self._drop(worker)
                raise
            else:
                self._give_back(worker)
                return answer
        raise Unavailable("no process could be started to render the chat template; try again later")

    def take_idle(self, job: bytes) -> Worker | None:
        """Returns a worker that can begin a small job at once, for `do_soon`; None = call `do` in a thread."""
        with self._changed:
            while len(job) <= SMALL_BYTES and self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    self._num_used += 1
                    worker.idle_since_s = None
                    return worker
                self.supervisor.end(worker)
        return None

    async def do_soon(self, worker: Worker, job: bytes) -> bytes:
        """Does the job with a worker that `take_idle` returned; the event loop goes on. Raises as `do` does."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            worker.send(job, until_s=time.monotonic() + WAIT_S)
            loop.add_reader(worker.fileno(), readable.set)
            try:
                await asyncio.wait_for(readable.wait(), WAIT_S)
            finally:
                loop.remove_reader(worker.fileno())
            answer = worker.receive(time.monotonic() + WAIT_S, MAX_ANSWER_BYTES)
        except TimeoutError:
            self._drop(worker)
            return _answer_for(Lost("", is_late=True))
        except Lost as lost:
            self._drop(worker)
            if not (lost.is_outside or lost.is_blameless):
                return _answer_for(lost)
        except BaseException:  # the client has gone: nobody reads the answer
            self._drop(worker)
            raise
        else:
            self._give_back(worker)
            return answer
        return await asyncio.to_thread(self.do, job)

    def _take(self) -> Worker:
        """Returns an idle worker, or another one. Raises Lost, and Unavailable where none could be had in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or self._num_used < MAX_WORKERS, WAIT_S):
                raise Unavailable("other chats are being rendered; try again later")
            self._num_used += 1
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    worker.idle_since_s = None
                    return worker
                self.supervisor.end(worker)
        try:
            if not self.supervisor.wait_ready(WAIT_S):
                raise Lost("no worker could be started", is_blameless=True)
            return self.supervisor.fork()
        except BaseException:
            self._release()
            raise

    def _give_back(self, worker: Worker) -> None:
        worker.idle_since_s = time.monotonic()
        with self._changed:
            self._idle.append(worker)
        self._release()

    def _drop(self, worker: Worker) -> None:
        self.supervisor.end(worker)
        self._release()

    def _release(self) -> None:
        with self._changed:
            self._num_used -= 1
            self._changed.notify()


def _answer_for(lost: Lost) -> bytes:
    """Returns the answer in place of that of a worker that ended at its work. Raises Unavailable."""
    if lost.is_late:
        raise Unavailable("the process that renders the chat template did not get to run; try again later")
    said = f"it takes more than {LIMITS.cpu_s} s of CPU time, or more than {LIMITS.memory_bytes >> 20} MiB of memory"
    return LIMIT + said.encode()


@functools.cache
def template_pool() -> TemplatePool | None:
    """Returns the only pool of this process, which all its servers share; None where the system has no helpers."""
    if why := why_no_helpers():
        log.warning("chat templates run in this process, where a hostile one can hold it up: %s", why)
        return None
    return TemplatePool()


def do(job: bytes) -> bytes:
    """Does a job of rendering a chat template, in the pool where there is one. Raises as `TemplatePool.do` does."""
    pool = template_pool()
    return do_job(job) if pool is None else pool.do(job)
