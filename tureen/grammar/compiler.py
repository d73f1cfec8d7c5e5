"""The engine's side of compiling: queue, deadlines, cache. Nothing here waits for anything."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Literal

import msgspec

from tureen.grammar import helper, orders
from tureen.grammar.backends.registry import check_backend, find_backend
from tureen.grammar.base import Backend, Compiled, Encode, GrammarSpec, Vocabulary
from tureen.grammar.cache import Cache, Result
from tureen.grammar.expression import GrammarError
from tureen.grammar.orders import Failure, Reply
from tureen.log import get_logger

PROGRAM = ("-m", "tureen.grammar.forge")
START_TIMEOUT_S = 20.0
MAX_WAIT_S = 30.0  # in the queue, behind others
MAX_ATTEMPTS = 2  # a helper process that dies is none of the client's doing
MAX_SLOW = 4
"""So many compiles of lowered priority may run beside the others: a slow one holds up no quick one."""

KEEP_S = 60.0  # a failure that may have come of the machine's load
State = Literal["pending", "ready", "failed"]

log = get_logger("grammar")


class Compilation:
    """What one request waits for."""

    __slots__ = ("compiled", "error", "spec")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.compiled: Compiled | None = None
        self.error: Failure | None = None

    @property
    def state(self) -> State:
        if self.compiled is not None:
            return "ready"
        return "pending" if self.error is None else "failed"

    def settle(self, result: Result) -> None:
        if isinstance(result, Failure):
            self.error = result
        else:
            self.compiled = result


class CompilerStats(msgspec.Struct):
    """Counts since the start; `pending` is of this moment."""

    compiles: int = 0  # that have ended, well or not
    hits: int = 0  # submissions that needed none: it was known, or under way
    failures: int = 0
    timeouts: int = 0  # of the failures
    compile_ms: float = 0.0  # of all compiles together, from their start to their end
    pending: int = 0


class Task:
    """One compile in the helper process."""

    __slots__ = ("_memory", "_pipe", "has_begun", "number", "reply", "started_s")

    def __init__(self, number: int, memory: int, pipe: int) -> None:
        self.number = number
        self.started_s = time.monotonic()
        self.has_begun = False
        self.reply: Reply | None = None
        self._memory = memory
        self._pipe = pipe

    def is_over(self) -> bool:
        """Ended: with a reply, or without one because the process died."""
        try:
            said = os.read(self._pipe, 2)
        except BlockingIOError:
            return False
        self.has_begun = True
        if orders.DONE in said:
            self.reply = msgspec.msgpack.decode(helper.contents(self._memory), type=Reply)
        return said != orders.BEGUN

    def close(self) -> None:
        os.close(self._memory)
        os.close(self._pipe)


class Forge:
    """The helper process. What is sent to it never waits: a socket that is full is as bad as a closed one."""

    def __init__(self, setup: int) -> None:
        self._numbers = itertools.count()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._process = helper.start(PROGRAM, [theirs.fileno(), setup])
        theirs.close()
        self._until_s = time.monotonic() + START_TIMEOUT_S
        self.is_ready = False

    def is_alive(self) -> bool:
        """Also notices when it is ready."""
        try:
            said = self._control.recv(1)
        except BlockingIOError:
            return self.is_ready or time.monotonic() < self._until_s
        except OSError:
            return False
        self.is_ready = self.is_ready or said == orders.READY
        return said == orders.READY

    def compile(self, spec: bytes) -> Task:
        """A GrammarSpec, encoded. Raises OSError."""
        number = next(self._numbers)
        with contextlib.ExitStack() as undo:
            memory = helper.memory_with(spec)
            undo.callback(os.close, memory)
            ours, theirs = os.pipe()
            undo.callback(os.close, ours)
            with open(theirs, "wb", buffering=0):
                socket.send_fds(self._control, [orders.MESSAGE.pack(orders.COMPILE, number)], [memory, theirs])
            os.set_blocking(ours, False)
            undo.pop_all()
        return Task(number, memory, ours)

    def end(self, task: Task) -> None:
        """The child of this task, if it still runs."""
        task.close()
        with contextlib.suppress(OSError):  # then all its children have ended
            self._control.send(orders.MESSAGE.pack(orders.END, task.number))

    def kill(self) -> None:
        """With all its children."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    def close(self) -> None:
        """It ends and buries its children first."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


class Job:
    """A constraint that is being compiled, for all who wait for it: queued, then a task, then loaded."""

    __slots__ = ("attempts", "encoded", "load", "queued_s", "source_bytes", "spec", "started_s", "task", "waiters")

    def __init__(self, spec: GrammarSpec, encoded: bytes) -> None:
        self.spec = spec
        self.encoded = encoded
        self.waiters: list[Compilation] = []
        self.queued_s = time.monotonic()
        self.started_s: float | None = None
        self.attempts = 0
        self.source_bytes = 0
        self.task: Task | None = None
        self.load: Future[Compiled] | None = None


class Compiler:
    """Compiles constraints elsewhere. One thread, the engine's, calls all of it; no call waits.

    It takes nothing until `prepare`, or the first constraint: make_vocabulary is called then.
    """

    def __init__(
        self,
        backend_name: str,
        make_vocabulary: Callable[[], Vocabulary],
        encode: Encode,
        *,
        timeout_s: float = 10.0,
        max_parallel: int = 2,
        cache_bytes: int = 64 << 20,
    ) -> None:
        """Raises StartupError when the backend's library is missing."""
        check_backend(backend_name)
        self._backend_name = backend_name
        self._make_vocabulary = make_vocabulary
        self._encode = encode
        self._timeout_s = timeout_s
        self._max_parallel = max_parallel
        self._cache = Cache(cache_bytes)
        self._jobs: dict[GrammarSpec, Job] = {}
        self._queue: deque[Job] = deque()
        self._loader = ThreadPoolExecutor(1, "load-grammar")
        self._stats = CompilerStats()
        self._setup: BinaryIO | None = None
        self._backend: Future[Backend] | None = None
        self._forge: Forge | None = None

    def prepare(self) -> None:
        """Begin what the first constraint would wait for. Raises OSError."""
        self._open_forge()

    def submit(self, spec: GrammarSpec) -> Compilation:
        """Its state may be settled at once: what is known, also a failure, is not compiled again."""
        compilation = Compilation(spec)
        known = self._cache.get(spec, time.monotonic())
        if known is not None:
            self._stats.hits += 1
            compilation.settle(known)
            return compilation
        job = self._jobs.get(spec)
        if job is not None:
            self._stats.hits += 1
            job.waiters.append(compilation)
            return compilation
        try:
            job = Job(spec, msgspec.msgpack.encode(spec))
        except UnicodeEncodeError:
            compilation.settle(
                orders.invalid(spec, GrammarError("it holds half of a surrogate pair, which is no text"))
            )
            return compilation
        job.waiters.append(compilation)
        self._jobs[spec] = job
        self._queue.append(job)
        self._advance_queue()
        return compilation

    def poll(self) -> None:
        """Take what has come, end what takes too long, begin what is next."""
        if not self._jobs:
            return
        now_s = time.monotonic()
        for job in list(self._jobs.values()):
            if job.load is not None:
                self._follow_load(job, job.load)
            elif job.task is not None:
                self._follow_task(job, job.task)
            elif job.spec in self._jobs and now_s - job.queued_s > MAX_WAIT_S:
                self._fail(job, _too_busy())
        self._advance_queue()

    def release(self, compilation: Compilation) -> None:
        """Its request does not wait any more. What nobody waits for is not compiled further."""
        job = self._jobs.get(compilation.spec)
        if job is None or compilation not in job.waiters:
            return
        job.waiters.remove(compilation)
        if not job.waiters and job.load is None:
            self._end(job)

    @property
    def stats(self) -> CompilerStats:
        """A copy."""
        return msgspec.structs.replace(self._stats, pending=len(self._jobs))

    def clear(self) -> None:
        """Forget what is compiled; what is under way goes on."""
        self._cache.clear()

    def close(self) -> None:
        """End the helper process with its children."""
        for job in list(self._jobs.values()):
            self._end(job)
        if self._forge is not None:
            self._forge.close()
            self._forge = None
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self._setup is not None:
            self._setup.close()

    def _follow_task(self, job: Job, task: Task) -> None:
        if task.is_over():
            if task.reply is not None:
                self._take(job, task.reply)
            elif self._is_forge_alive():
                self._fail(job, orders.too_complex(job.spec, "the process that compiled it died of it"), KEEP_S)
        elif self._check_deadline(job) and not task.has_begun:  # the forge itself is stuck
            self._bury_forge()

    def _check_deadline(self, job: Job) -> bool:
        """True when it has passed: the job has failed."""
        if job.started_s is None or time.monotonic() - job.started_s <= self._timeout_s:
            return False
        self._stats.timeouts += 1
        self._fail(job, _timeout(job.spec, self._timeout_s), KEEP_S)
        return True

    def _take(self, job: Job, reply: Reply) -> None:
        if reply.failure is not None:
            keep_s = KEEP_S if reply.failure.status >= 500 else math.inf
            self._fail(job, reply.failure, keep_s)
            return
        self._end_task(job)
        job.source_bytes = len(reply.source)
        job.load = self._loader.submit(self._load, reply.source)

    def _load(self, source: bytes) -> Compiled:
        assert self._backend is not None
        return self._backend.result().load(source)

    def _follow_load(self, job: Job, load: Future[Compiled]) -> None:
        if not load.done():
            self._check_deadline(job)
            return
        error = load.exception()
        if error is None:
            compiled = load.result()
            self._settle(job, compiled, job.source_bytes + compiled.num_bytes, math.inf)
        elif isinstance(error, GrammarError):
            self._fail(job, orders.invalid(job.spec, error), math.inf)
        else:
            self._fail(job, orders.broken(job.spec, error), KEEP_S)

    def _fail(self, job: Job, failure: Failure, keep_s: float = 0.0) -> None:
        if failure.status == 500:
            log.error(failure.message)
        self._stats.failures += 1
        self._settle(job, failure, 4 * len(failure.message), keep_s)

    def _settle(self, job: Job, result: Result, num_bytes: int, keep_s: float) -> None:
        """`keep_s`: how long it is remembered."""
        now_s = time.monotonic()
        if job.started_s is not None:
            self._stats.compiles += 1
            self._stats.compile_ms += (now_s - job.started_s) * 1000
        for compilation in job.waiters:
            compilation.settle(result)
        if keep_s > 0:
            self._cache.put(job.spec, result, num_bytes, now_s + keep_s)
        self._end(job)

    def _end(self, job: Job) -> None:
        self._jobs.pop(job.spec)
        self._end_task(job)
        with contextlib.suppress(ValueError):
            self._queue.remove(job)

    def _end_task(self, job: Job) -> None:
        if job.task is not None and self._forge is not None:
            self._forge.end(job.task)
        job.task = None

    def _advance_queue(self) -> None:
        """Begin queued compiles as far as there is room for them."""
        while self._queue and self._has_room():
            try:
                forge = self._open_forge()
                if not self._is_forge_alive() or not forge.is_ready:
                    return
                task = forge.compile(self._queue[0].encoded)
            except OSError:
                self._bury_forge()
                return
            job = self._queue.popleft()
            job.task = task
            job.started_s = task.started_s

    def _open_forge(self) -> Forge:
        """The one that there is, or a new one. Raises OSError."""
        if self._setup is None:
            vocabulary = self._make_vocabulary()
            setup = orders.Setup(self._backend_name, vocabulary, self._timeout_s)
            self._setup = os.fdopen(helper.memory_with(msgspec.msgpack.encode(setup)), "rb")
            # nobody waits for it before the first load
            self._backend = self._loader.submit(lambda: find_backend(self._backend_name)(vocabulary, self._encode))
        if self._forge is None:
            self._forge = Forge(self._setup.fileno())
        return self._forge

    def _has_room(self) -> bool:
        now_s = time.monotonic()
        running = [job.task for job in self._jobs.values() if job.task is not None]
        quick = [task for task in running if now_s - task.started_s < 2 * orders.LOWER_AFTER_S]
        return len(quick) < self._max_parallel and len(running) < self._max_parallel + MAX_SLOW

    def _is_forge_alive(self) -> bool:
        """A dead one is buried."""
        if self._forge is not None and self._forge.is_alive():
            return True
        self._bury_forge()
        return False

    def _bury_forge(self) -> None:
        """What it was to do is tried once more, with the next one."""
        log.warning("the process that compiles constraints ended; another one is started when it is needed")
        for job in reversed(list(self._jobs.values())):
            if job.load is not None:
                continue
            if job.task is not None:
                self._end_task(job)
                self._queue.appendleft(job)
            job.attempts += 1
            if job.attempts >= MAX_ATTEMPTS:
                self._fail(job, _lost())
        if self._forge is not None:
            self._forge.kill()
            self._forge = None


def _timeout(spec: GrammarSpec, timeout_s: float) -> Failure:
    return Failure(
        400,
        "grammar_compile_timeout",
        f"this {spec.kind} was not compiled within {timeout_s:g} s; make it simpler: shorter lists of alternatives, "
        "smaller bounds on lengths and repeats, fewer optional parts, less nesting",
    )


def _too_busy() -> Failure:
    return Failure(503, "grammar_queue_full", f"other constraints were compiled first for {MAX_WAIT_S:g} s; try again")


def _lost() -> Failure:
    return Failure(503, "grammar_compiler_lost", "the process that compiles constraints ended; try again")
