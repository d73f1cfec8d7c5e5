"""Renders chat templates in worker processes. A single operation of a template can run for ever, and only killing its
process stops it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from tureen.errors import Unavailable
from tureen.log import get_logger
from tureen.requests.template_worker import LIMITS
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import Supervisor, why_no_helpers
from tureen.sandbox.worker import Lost, Worker
from tureen.text.template_jobs import LIMIT, MAX_ANSWER_BYTES, do_job

PROGRAM = "tureen.requests.template_worker"
MAX_WORKERS: Final = 3
MAX_ATTEMPTS: Final = 3  # if something other than the chat ends the worker
WAIT_S: Final = 60.0  # for a turn, and for the worker's answer; the worker's computing is limited by CPU time
START_S: Final = 20.0  # for the fork server to become ready
SMALL_BYTES: Final = 64 << 10  # of a job or an answer; a socket takes this many without blocking

T = TypeVar("T")

log = get_logger("chat")


class TemplatePool:
    """The worker processes of all chat templates of this process. They start when first needed."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_closed = False
        self.supervisor = Supervisor("the workers that render chat templates", PROGRAM, LIMITS)
        self._lock = threading.RLock()
        self._idle: list[Worker] = []
        self._num_used = 0  # turns that are taken; each turn has at most one worker
        self._turns: deque[Future[None]] = deque()  # not taken yet, first come, first served
        self._threads = ThreadPoolExecutor(MAX_WORKERS, "chat-templates")
        self._has_budget = False
        self._is_down = False

    def share(self, budget: MemoryBudget) -> None:
        """Counts the workers' memory for this budget, unless another server's budget counts it already."""
        if not self._has_budget:
            self._has_budget = True
            self.supervisor.share(budget)

    def do(self, job: bytes) -> bytes:
        """Returns the answer to a job. Any thread may call this method, which blocks.

        Raises Unavailable if no worker is free or starts in time, or if the pool is closed.
        """
        for _ in range(MAX_ATTEMPTS):
            turn = self._ask_turn()
            try:
                turn.result(WAIT_S)
            except TimeoutError:
                self._leave(turn)
                raise Unavailable("other chats are being rendered; try again later") from None
            except BaseException:
                self._leave(turn)
                raise
            answer = self._attempt(job)
            if answer is not None:
                return answer
        raise _not_started()

    async def do_soon(self, job: bytes) -> bytes:
        """Returns the answer to a job without blocking the event loop. Waits for its turn without a time limit.

        Raises as `do` does.
        """
        for _ in range(MAX_ATTEMPTS):
            turn = self._ask_turn()
            try:
                if not turn.done():
                    await asyncio.wrap_future(turn)
                turn.result()
            except BaseException:
                self._leave(turn)
                raise
            answer = await self._attempt_soon(job)
            if answer is not None:
                return answer
        raise _not_started()

    async def _attempt_soon(self, job: bytes) -> bytes | None:
        """Does a job as `_attempt` does, in a thread if the event loop could block."""
        try:
            worker = self._idle_worker() if len(job) <= SMALL_BYTES else None
        except BaseException:
            self._release()
            raise
        if worker is None:
            return await self._in_thread(self._release, self._attempt, job)
        try:
            is_sent = worker.try_send(job)
            has_reply = is_sent and await self._has_small_reply(worker)
        except BaseException:  # the client has disconnected, so no request reads the answer
            self._drop(worker)
            raise
        if not is_sent:  # the worker ended while it was idle
            self._drop(worker)
            return None
        if has_reply:
            return self._receive(worker)
        # reading the reply can block, and so can finding out how the worker ended
        return await self._in_thread(lambda: self._drop(worker), self._receive, worker)

    async def _in_thread(self, undo: Callable[[], None], work: Callable[[T], bytes | None], on: T) -> bytes | None:
        """Calls `work`, which ends the caller's turn, in one of the pool's threads. There is a thread for each turn, so
        that no other work can keep a turn waiting. undo: ends the turn if no thread starts."""
        try:
            answer = self._threads.submit(work, on)
        except RuntimeError:
            undo()
            raise _not_started() from None
        return await asyncio.shield(asyncio.wrap_future(answer))  # `work` ends the turn, even if the client disconnects

    def close(self) -> None:
        """Ends all workers. Whatever waits for one gets Unavailable."""
        with self._lock:
            self.is_closed = True
            turns, self._turns = self._turns, deque()
            idle, self._idle = self._idle, []
        for turn in turns:
            if turn.set_running_or_notify_cancel():
                turn.set_exception(_closed())
        self.supervisor.close()
        for worker in idle:
            self.supervisor.end(worker)
        self._threads.shutdown(wait=False)

    @staticmethod
    async def _has_small_reply(worker: Worker) -> bool:
        """Waits for the worker's reply or end. Returns whether reading the reply cannot block."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(worker.fileno(), readable.set)
        try:
            await asyncio.wait_for(readable.wait(), WAIT_S)
        except TimeoutError:
            raise _late() from None
        finally:
            loop.remove_reader(worker.fileno())
        return worker.has_reply(SMALL_BYTES)

    def _attempt(self, job: bytes) -> bytes | None:
        """Does a job in the caller's turn, which ends. Returns None if another worker may succeed. Raises
        Unavailable."""
        try:
            worker = self._idle_worker() or self._start_worker()
        except Lost:
            self._release()
            return None
        except BaseException:
            self._release()
            raise
        return self._receive(worker, job)

    def _receive(self, worker: Worker, job: bytes | None = None) -> bytes | None:
        """Returns the worker's answer, and ends the turn. job: to send first. Returns None and raises as `_attempt`."""
        try:
            if job is not None:
                worker.begin(time.monotonic() + WAIT_S)
                worker.send(job, until_s=time.monotonic() + WAIT_S)
            answer = worker.receive(time.monotonic() + WAIT_S, MAX_ANSWER_BYTES)
        except Lost as lost:
            is_killed = worker.is_killed  # by the memory budget, for example; `_drop` sets it
            self._drop(worker)
            if is_killed or lost.is_outside or lost.is_blameless:
                return None
            return _answer_for(lost)
        except BaseException:
            self._drop(worker)
            raise
        self._give_back(worker)
        return answer

    def _start_worker(self) -> Worker:
        """Forks a worker. Raises Lost; Unavailable if the fork server is not ready."""
        if not self.supervisor.wait_ready(0.0 if self._is_down else START_S):
            if self.is_closed:
                raise _closed()
            self._is_down = True  # the next chat does not wait
            raise Unavailable(
                f"the process that starts {self.supervisor.name} is not ready; the server's log says more; try again "
                "later"
            )
        self._is_down = False
        return self.supervisor.fork()

    def _idle_worker(self) -> Worker | None:
        """Returns an idle worker, for the caller's turn."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                worker = self._idle.pop()
            try:
                is_usable = worker.is_alive and not worker.is_killed
            except BaseException:
                self.supervisor.end(worker)
                raise
            if is_usable:
                worker.idle_since_s = None
                return worker
            self.supervisor.end(worker)

    def _ask_turn(self) -> Future[None]:
        """Returns a future that is done when the caller may use a worker."""
        turn: Future[None] = Future()
        with self._lock:
            if self.is_closed:
                turn.set_exception(_closed())
            elif self._num_used < MAX_WORKERS:
                self._num_used += 1
                turn.set_result(None)
            else:
                self._turns.append(turn)
        return turn

    def _leave(self, turn: Future[None]) -> None:
        """Gives up a turn, whether or not it has been taken."""
        if not turn.cancel() and turn.exception() is None:
            self._release()

    def _release(self) -> None:
        """Ends a turn; the next one begins."""
        with self._lock:
            while self._turns:
                turn = self._turns.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._num_used -= 1

    def _give_back(self, worker: Worker) -> None:
        worker.idle_since_s = time.monotonic()
        with self._lock:
            is_kept = not self.is_closed
            if is_kept:
                self._idle.append(worker)
        if not is_kept:
            self.supervisor.end(worker)
        self._release()

    def _drop(self, worker: Worker) -> None:
        try:
            self.supervisor.end(worker)
        finally:
            self._release()


def _answer_for(lost: Lost) -> bytes:
    """Returns the answer in place of that of a worker that ended at its work. Raises Unavailable."""
    if lost.is_late:
        raise _late()
    said = f"it takes more than {LIMITS.cpu_s} s of CPU time, or more than {LIMITS.memory_bytes >> 20} MiB of memory"
    return LIMIT + said.encode()


def _late() -> Unavailable:
    return Unavailable("the process that renders the chat template got no CPU time; try again later")


def _not_started() -> Unavailable:
    return Unavailable("the process that renders chat templates could not be started; try again later")


def _closed() -> Unavailable:
    return Unavailable("the server is shutting down and renders no more chat templates")


_pools: list[TemplatePool] = []  # the pool of this process, if it has one
_pools_lock = threading.Lock()


@functools.cache
def _can_have_pool() -> bool:
    if why := why_no_helpers():
        log.warning("chat templates run in this process, which a hostile template can block: %s", why)
    return not why


def template_pool() -> TemplatePool | None:
    """Returns the only pool of this process, which all its servers share. Returns None if the system cannot have
    helper processes. After the last user left, the pool is closed until the next user joins."""
    if not _can_have_pool():
        return None
    with _pools_lock:
        if not _pools:
            _pools.append(TemplatePool())
        return _pools[0]


def join() -> TemplatePool | None:
    """Counts the caller as a user of the pool, and returns the pool. The user must call `leave`."""
    pool = template_pool()
    if pool is None:
        return None
    with _pools_lock:
        if _pools[0].is_closed:
            _pools[0] = TemplatePool()
        _pools[0].num_users += 1
        return _pools[0]


def leave(pool: TemplatePool) -> bool:
    """Ends what `join` began. Returns whether that was the last user, who must close the pool."""
    with _pools_lock:
        pool.num_users -= 1
        pool.is_closed = not pool.num_users
        return pool.is_closed


def do(job: bytes) -> bytes:
    """Does a job of rendering a chat template, in the pool if there is one. Raises as `TemplatePool.do` does."""
    pool = template_pool()
    return do_job(job) if pool is None else pool.do(job)
