"""The engine's side of compiling: queue, deadlines, cache. Nothing here waits for anything."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec

from tureen.grammar import CompiledGrammar, Encode, GrammarError, GrammarSpec, TooComplex, Unenforced, Vocabulary
from tureen.grammar_service import messages
from tureen.grammar_service.cache import Cache, Ready, Result
from tureen.grammar_service.compile_pool import LOWER_AFTER_S, CompilePool, Task
from tureen.grammar_service.kept_grammars import KeptGrammars
from tureen.grammar_service.loading import LazyCompilers
from tureen.grammar_service.messages import CompileReply, Failure
from tureen.log import RateLimit, get_logger
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.stacks import DeepExecutor
from tureen.sandbox.supervisor import Supervisor

MAX_WAIT_S = 30.0  # in the queue, behind others
MAX_RUNNING_S = 60.0
"""For how long a compile goes on whose deadline, which counts its own processor time, does not come: the processor is
busy with others."""
HALF_A_PAIR = "it holds half of a surrogate pair, which is not text"
NOT_BEGUN = f"other constraints came first, and this one did not start within {MAX_WAIT_S:g} s"
STARVED = f"it got too little CPU time within {MAX_RUNNING_S:g} s"
MAX_ATTEMPTS = 2  # a fork server that dies is none of the client's doing, nor is one end from outside
MAX_SLOW = 4
"""The number of compiles of lowered priority that may run beside the others: a slow one holds up no quick one."""

PACE_SHARE = 0.3  # that the last compile has in what is told about how long one takes
WORTH_KEEPING_S = 0.02  # of processor time: what takes longer is kept on disk
KEEP_S = 60.0  # a failure that may have come of the machine's load
Opening = Future[tuple[bytes, LazyCompilers]]
"""The setup of the workers, and the loaders of what they compile."""
State = Literal["pending", "ready", "failed"]

log = get_logger("grammar")


class Compilation:
    """The compilation that one request waits for."""

    __slots__ = ("compiled", "error", "spec", "unenforced")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.compiled: CompiledGrammar | None = None
        self.unenforced: tuple[Unenforced, ...] = ()  # of what the constraint says
        self.error: Failure | None = None

    @property
    def state(self) -> State:
        if self.compiled is not None:
            return "ready"
        return "pending" if self.error is None else "failed"

    def settle(self, result: Result) -> None:
        """Notes how it ended."""
        if isinstance(result, Failure):
            self.error = result
        else:
            self.compiled, self.unenforced = result


class CompilerStats(msgspec.Struct):
    """Counts since the start; `pending` is of this moment."""

    compiles: int = 0  # that have ended, well or not
    hits: int = 0  # submissions that needed none: it was known, or under way
    failures: int = 0
    timeouts: int = 0  # of the failures
    compile_ms: float = 0.0  # of all compiles together, from their start to their end
    pending: int = 0
    seconds_each: float = 0.0  # from start to end, the last compiles counting most

    def note(self, seconds: float) -> None:
        """Count a compile that took this long."""
        self.compiles += 1
        self.compile_ms += seconds * 1000
        self.seconds_each += PACE_SHARE * (seconds - self.seconds_each)


class CompileJob:
    """A constraint that is being compiled, for all who wait for it: queued, then a task, then loaded."""

    __slots__ = (
        "attempts",
        "encoded",
        "load",
        "num_replaced",
        "queued_s",
        "source_bytes",
        "spec",
        "started_s",
        "task",
        "unenforced",
        "waiters",
    )

    def __init__(self, spec: GrammarSpec, encoded: bytes, num_replaced: int) -> None:
        self.spec = spec
        self.encoded = encoded
        self.waiters: list[Compilation] = []
        self.queued_s = time.monotonic()
        self.started_s: float | None = None
        self.attempts = 0
        self.num_replaced = num_replaced  # of fork servers, when it came
        self.source_bytes = 0
        self.task: Task | None = None
        self.unenforced: tuple[Unenforced, ...] = ()
        self.load: Future[CompiledGrammar | None] | None = None


class Compiler:
    """Compiles constraints elsewhere. One thread, the engine's, calls all of it; no call waits.

    It uses no resources until the first constraint; then a thread calls make_vocabulary.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        encode: Encode,
        *,
        timeout_s: float = 10.0,
        max_parallel: int = 2,
        cache_bytes: int = 64 << 20,
        kept: KeptGrammars | None = None,
    ) -> None:
        """`timeout_s`: of processor time."""
        self._make_vocabulary = make_vocabulary
        self._encode = encode
        self._timeout_s = timeout_s
        self._max_parallel = max_parallel
        self._cache = Cache(cache_bytes)
        self._kept = kept
        self._budget: MemoryBudget | None = None
        self._jobs: dict[GrammarSpec, CompileJob] = {}
        self._queue: deque[CompileJob] = deque()
        self._loader = DeepExecutor(1, "load-grammar")
        self._stats = CompilerStats()
        self._opening: Opening | None = None
        self._pool: CompilePool | None = None
        self._complaints = RateLimit(count=1, interval_s=10.0)

    def share(self, budget: MemoryBudget) -> None:
        """The processes that compile count for this budget, once there are some."""
        self._budget = budget

    @property
    def supervisor(self) -> Supervisor | None:
        """The one of the processes that compile, once there are some."""
        return None if self._pool is None else self._pool.supervisor

    @property
    def _num_replaced(self) -> int:
        return 0 if self._pool is None else self._pool.supervisor.num_replaced

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
            job = CompileJob(spec, msgspec.msgpack.encode(spec), self._num_replaced)
        except UnicodeEncodeError:
            compilation.settle(messages.invalid(spec, GrammarError(HALF_A_PAIR)))
            return compilation
        job.waiters.append(compilation)
        self._jobs[spec] = job
        self._load_or_enqueue(job)
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
                self._fail(job, _too_busy(NOT_BEGUN, self._wait_s))
            elif self._num_replaced - job.num_replaced >= MAX_ATTEMPTS:
                self._fail(job, _lost())
        self._advance_queue()

    def release(self, compilation: Compilation) -> None:
        """Its request does not wait any more. A compilation that no request waits for is stopped."""
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
        if self._kept is not None:
            self._loader.submit(self._kept.clear)

    def close(self) -> None:
        """End the processes that compile."""
        for job in list(self._jobs.values()):
            self._end(job)
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _follow_task(self, job: CompileJob, task: Task) -> None:
        if self._check_deadline(job) or not task.is_over:
            return
        if task.reply is not None:
            self._take(job, task.reply)
        elif not (task.is_blameless or task.is_outside):
            self._fail(job, messages.too_complex(job.spec, "the process that compiled it crashed"), KEEP_S)
        else:
            job.attempts += task.has_begun
            self._end_task(job)
            if job.attempts < MAX_ATTEMPTS:
                self._queue.appendleft(job)
            elif task.is_outside:
                self._fail(job, _ended_from_outside(job.spec), KEEP_S)
            else:
                self._fail(job, _lost())

    def _check_deadline(self, job: CompileJob) -> bool:
        """True when it has passed: the job has failed."""
        if job.task is not None and job.task.cpu_s > self._timeout_s:
            self._stats.timeouts += 1
            self._fail(job, _timeout(job.spec, self._timeout_s), KEEP_S)
            return True
        if job.started_s is None or time.monotonic() - job.started_s <= MAX_RUNNING_S:
            return False
        self._fail(job, _too_busy(STARVED, self._wait_s))
        return True

    @property
    def _wait_s(self) -> float:  # until a compile that came now would be done, at the pace of the last ones
        return self._stats.seconds_each * (1 + len(self._jobs)) / self._max_parallel

    def _take(self, job: CompileJob, reply: CompileReply) -> None:
        if reply.failure is not None:
            keep_s = KEEP_S if reply.failure.status >= 500 else math.inf
            self._fail(job, reply.failure, keep_s)
            return
        if self._kept is not None and job.task is not None and job.task.cpu_s > WORTH_KEEPING_S:
            self._loader.submit(self._kept.write, job.encoded, reply)
        self._end_task(job)
        job.source_bytes, job.unenforced = len(reply.source), reply.unenforced
        job.load = self._loader.submit(_load, self._opening, reply)

    def _follow_load(self, job: CompileJob, load: Future[CompiledGrammar | None]) -> None:
        if not load.done():
            self._check_deadline(job)
            return
        error = load.exception()
        compiled = load.result() if error is None else None
        if compiled is not None:
            num_bytes = job.source_bytes + compiled.num_bytes
            self._settle(job, Ready(compiled, job.unenforced), num_bytes, math.inf)
        elif error is None:  # it is not kept after all
            job.load = None
            self._queue.append(job)
        elif isinstance(error, TooComplex):
            self._fail(job, messages.too_complex(job.spec, str(error)), math.inf)
        elif isinstance(error, GrammarError):
            self._fail(job, messages.invalid(job.spec, error), math.inf)
        else:
            self._fail(job, messages.broken(job.spec, error), KEEP_S)

    def _fail(self, job: CompileJob, failure: Failure, keep_s: float = 0.0) -> None:
        if failure.status == 500:
            log.error(failure.message)
        self._stats.failures += 1
        self._settle(job, failure, 4 * len(failure.message), keep_s)

    def _settle(self, job: CompileJob, result: Result, num_bytes: int, keep_s: float) -> None:
        """`keep_s`: how long it is remembered."""
        now_s = time.monotonic()
        if job.started_s is not None:
            self._stats.note(now_s - job.started_s)
        for compilation in job.waiters:
            compilation.settle(result)
        if keep_s > 0:
            self._cache.put(job.spec, result, num_bytes, now_s + keep_s)
        self._end(job)

    def _end(self, job: CompileJob) -> None:
        self._jobs.pop(job.spec)
        self._end_task(job)
        with contextlib.suppress(ValueError):
            self._queue.remove(job)

    def _end_task(self, job: CompileJob) -> None:
        if job.task is not None:
            job.task.end()
        job.task = None

    def _load_or_enqueue(self, job: CompileJob) -> None:
        """Load the job's grammar from disk if it is kept; otherwise queue the job."""
        if self._kept is not None and self._kept.has(job.encoded):
            job.load = self._loader.submit(_load_kept, job, self._kept, self._opening)
        else:
            self._queue.append(job)

    def _advance_queue(self) -> None:
        """Begin queued compiles as far as there is room for them. What the system has nothing for now waits."""
        try:
            pool = self._open_pool() if self._queue else None
            while pool is not None and pool.is_ready and self._queue and self._has_room():
                self._queue[0].task = pool.compile(self._queue[0].encoded)
                self._queue.popleft().started_s = time.monotonic()
        except (OSError, RuntimeError) as error:  # no descriptors, no thread
            if self._complaints.admit() is not None:
                log.error("a constraint cannot be compiled now: %s", error)

    def _open_pool(self) -> CompilePool | None:
        """Return the pool; None while a thread prepares what the first constraint needs."""
        if self._pool is None:
            if self._opening is None:
                parts = (self._make_vocabulary, self._encode, self._kept)
                self._opening = self._loader.submit(_prepare, *parts)
            if not self._opening.done():
                return None
            if (error := self._opening.exception()) is not None:
                self._opening = None  # the next constraint tries again
                for job in list(self._queue):
                    self._fail(job, messages.broken(job.spec, error))
                return None
            setup, loaders = self._opening.result()
            self._pool = CompilePool(setup, self._max_parallel + MAX_SLOW)
            self._loader.submit(loaders.get, has_specials=False)  # while the workers start
            if self._budget is not None:
                self._pool.supervisor.share(self._budget)
            for job in [self._queue.popleft() for _ in range(len(self._queue))]:  # the kept grammars are listed now
                self._load_or_enqueue(job)
        return self._pool

    def _has_room(self) -> bool:
        now_s = time.monotonic()
        running = [job for job in self._jobs.values() if job.task is not None]
        quick = [job for job in running if now_s - (job.started_s or now_s) < 2 * LOWER_AFTER_S]
        return len(quick) < self._max_parallel and len(running) < self._max_parallel + MAX_SLOW


def _timeout(spec: GrammarSpec, timeout_s: float) -> Failure:
    return Failure(
        400,
        "grammar_compile_timeout",
        f"this {spec.kind} was not compiled within {timeout_s:g} s of processor time; make it simpler: "
        "shorter lists of alternatives, smaller bounds on lengths and repeats, fewer optional parts, less nesting",
    )


def _prepare(
    make_vocabulary: Callable[[], Vocabulary], encode: Encode, kept: KeptGrammars | None
) -> tuple[bytes, LazyCompilers]:
    """Builds the vocabulary, a third of a second for 150,000 tokens, and what depends on it."""
    vocabulary = make_vocabulary()
    setup = msgspec.msgpack.encode(messages.CompilerSetup(vocabulary))
    loaders = LazyCompilers(vocabulary, encode)
    if kept is not None:
        kept.list_files(vocabulary)  # last, because a listed grammar is loaded without asking again
    return setup, loaders


def _load(opening: Opening | None, reply: CompileReply) -> CompiledGrammar:
    assert opening is not None
    return opening.result()[1].load(reply)


def _load_kept(job: CompileJob, kept: KeptGrammars, opening: Opening | None) -> CompiledGrammar | None:
    """Loads a kept grammar; returns None if its file is missing or damaged."""
    reply = kept.read(job.encoded)
    if reply is None:
        return None
    job.source_bytes, job.unenforced = len(reply.source), reply.unenforced
    try:
        return _load(opening, reply)
    except (GrammarError, ValueError):  # compiled anew, it says what is wrong
        return None


def _too_busy(why: str, wait_s: float) -> Failure:
    return Failure(503, "grammar_queue_full", f"{why}; try again", max(1, math.ceil(wait_s)))


def _ended_from_outside(spec: GrammarSpec) -> Failure:
    return Failure(
        503,
        "grammar_compiler_lost",
        f"the process that compiled this {spec.kind} was killed {MAX_ATTEMPTS} times; the system does so when memory "
        f"is short: make the constraint smaller, or try again in {KEEP_S:.0f} s",
        math.ceil(KEEP_S),
    )


def _lost() -> Failure:
    return Failure(503, "grammar_compiler_lost", "the process that compiles constraints ended; try again")
