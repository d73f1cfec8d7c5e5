"""The workers of client processors: one for each pair of client and payload. They are loaded in threads, beside the
steps."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, Unavailable, excerpt
from tureen.sampling import processor_messages as messages
from tureen.sampling.processor_charges import Charges
from tureen.sandbox import seccomp
from tureen.sandbox.supervisor import Supervisor
from tureen.sandbox.worker import Lost, Worker

PROGRAM = "tureen.sampling.processor_worker"
START_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 10.0  # of the clock on the wall: LOAD_CPU_S of the processor is what code may take to load
LOAD_CPU_S = 2.0
CALL_TIMEOUT_S = 1.0
IDLE_S = 30.0
"""Seconds for which a worker that no request needs is kept for the next one."""

MAX_WORKERS = 16
MAX_LOADS = 4

Rows = NDArray[np.float32]


class WorkerKey(NamedTuple):
    """The client and the payload that a worker is for. Two clients share no worker, whatever they send."""

    client: str
    digest: bytes  # of the payload


class ProcessorError(Exception):
    """A processor failed. `is_rejected`: it could not even be loaded."""

    def __init__(self, message: str, *, is_rejected: bool = False) -> None:
        super().__init__(message)
        self.is_rejected = is_rejected


class Raised(ProcessorError):
    """The processor raised, or returned something other than logits. Its worker can be used again."""


class Tracked:
    """A sequence as workers know it. `output_ids` grows as tokens are drawn."""

    __slots__ = ("number", "output_ids", "params", "prompt_ids")

    def __init__(self, number: int, params: dict[str, Any], prompt_ids: list[int], output_ids: list[int]) -> None:
        self.number = number
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids


def key_of(client: str, payload: str) -> WorkerKey:
    """Returns the key of a client's payload; a hash stands for the payload."""
    return WorkerKey(client, hashlib.sha256(payload.encode()).digest())


class ProcessorBatch(NamedTuple):
    """Rows of logits [vocabulary] of one client's sequences whose requests sent the same payload."""

    key: WorkerKey
    logits: Sequence[Rows]
    sequences: Sequence[Tracked]


class RemoteProcessor:
    """A client's code in its worker. It is not trusted: replies have a fixed size, and its memory is copied before it
    is read."""

    def __init__(self, worker: Worker, rows: Rows) -> None:
        self.worker = worker
        self._rows = rows
        self._copies = np.empty_like(rows)  # out of the worker's reach; touched only as far as it is used
        self._known: dict[int, int] = {}  # sequence -> how many output tokens the worker has heard of
        self._dropped: list[int] = []
        self._number = 0  # of the newest message; a reply names the one it answers

    def load(self, payload: str) -> None:
        """Has the worker load the payload. Raises ProcessorError, Lost."""
        until_s = time.monotonic() + LOAD_TIMEOUT_S
        self.worker.begin(time.monotonic() + START_TIMEOUT_S)
        self.worker.send(msgspec.msgpack.encode(messages.LoadCode(payload)), until_s=until_s)
        while not self.worker.wait_readable(0.05):
            if self.worker.cpu_s > LOAD_CPU_S or time.monotonic() > until_s:
                raise Lost(f"it was not loaded within {LOAD_CPU_S:g} s", has_begun=True, is_late=True)
        self._receive(until_s)

    def start(self, logits: Sequence[Rows], sequences: Sequence[Tracked], until_s: float) -> None:
        """Sends rows of logits [vocabulary], and the sequence of each row, to the worker.

        until_s: when it must have taken them, in seconds of the monotonic clock. Raises Lost.
        """
        for place, row in enumerate(logits):
            self._rows[place] = row
        rows, new = [], []
        for sequence in sequences:
            heard = self._known.get(sequence.number)
            if heard is None:
                params = msgspec.json.encode(sequence.params)
                new.append(messages.NewSequence(sequence.number, params, sequence.prompt_ids, sequence.output_ids))
                heard = len(sequence.output_ids)
            rows.append((sequence.number, sequence.output_ids[heard:]))
            self._known[sequence.number] = len(sequence.output_ids)
        self._number += 1
        message = messages.RunRows(self._number, rows, new, self._dropped)
        self._dropped = []
        self.worker.send(msgspec.msgpack.encode(message), until_s=until_s)

    def finish(self, num_rows: int, until_s: float) -> Rows:
        """Returns the changed logits: a copy that the worker cannot reach, valid until the next call.

        Raises ProcessorError, Lost.
        """
        self._receive(until_s)
        copies = self._copies[:num_rows]
        np.copyto(copies, self._rows[:num_rows])
        return copies

    def drop(self, number: int) -> None:
        """Forgets a sequence, here and in the worker."""
        if self._known.pop(number, None) is not None:
            self._dropped.append(number)

    def _receive(self, until_s: float) -> None:
        data = self.worker.receive(until_s, messages.REPLY.size)
        statuses = (messages.DONE, messages.FAILED, messages.REJECTED)
        number, status, length, text = messages.REPLY.unpack(data.ljust(messages.REPLY.size, b"\xff"))
        if len(data) != messages.REPLY.size or number != self._number or status not in statuses:
            raise Lost("it answered out of order", has_begun=True)
        if status != messages.DONE:
            shown = excerpt(text[:length].decode(errors="replace"))
            raise Raised(shown) if status == messages.FAILED else ProcessorError(shown, is_rejected=True)


class Lease:
    """A client's processor while requests need it: it is being loaded, is loaded, or has failed."""

    def __init__(self, key: WorkerKey, payload: str) -> None:
        self.key = key
        self.payload = payload
        self.num_users = 0
        self.idle_since_s = 0.0
        self.processor: RemoteProcessor | None = None
        self.error: ProcessorError | None = None
        self.is_settled = threading.Event()

    def note_use(self, idle_since_s: float | None) -> None:
        """Notes since when the processor is idle, in seconds of the monotonic clock; None: requests need it."""
        self.idle_since_s = idle_since_s or 0.0
        if self.processor is not None:
            self.processor.worker.idle_since_s = idle_since_s


class ProcessorPool:
    """All workers of client processors. The engine's thread calls it; loading and expiry happen in other threads."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the fork server; returns when a worker could be sealed. Raises StartupError."""
        if not seccomp.is_supported():
            raise StartupError(
                "--enable-custom-logit-processor needs Linux on x86-64 or aarch64: client code runs under seccomp"
            )
        self._shape = (max_rows, vocab_size)
        self._clock = clock
        self.charges = Charges(clock)
        self._lock = threading.Lock()
        self._leases: dict[WorkerKey, Lease] = {}
        self._waits: dict[str, float] = {}
        setup = msgspec.msgpack.encode(messages.LogitsShape(*self._shape))
        self.supervisor = Supervisor(
            "the workers of client processors",
            PROGRAM,
            messages.LIMITS,
            setup=setup,
            tick=self.end_idle,
        )
        self._threads = ThreadPoolExecutor(MAX_LOADS, "load-processor")
        if not self._can_seal():
            self.close()
            raise StartupError("--enable-custom-logit-processor: the sandbox for client code did not start")

    def acquire(self, client: str, payload: str) -> Lease:
        """Has a client's processor loaded, or shares the one that it has. `release` it when the request has ended.

        Does not wait. Raises TooManyRequests for a client whose code held up others too long, Unavailable.
        """
        self.charges.check(client)
        key = key_of(client, payload)
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None and lease.num_users == 0 and _has_lost_worker(lease):
                self._end(lease)
                lease = None
            if lease is None or lease.error is not None:
                self._make_room()
                lease = self._leases[key] = Lease(key, payload)
                self._begin_load(lease)
            lease.num_users += 1
            lease.note_use(None)
            return lease

    def release(self, lease: Lease) -> None:
        """Gives up one request's use of a processor."""
        with self._lock:
            lease.num_users -= 1
            if lease.num_users == 0:
                lease.note_use(self._clock())

    def run(self, batches: Sequence[ProcessorBatch]) -> list[Rows | ProcessorError]:
        """Processes the rows of all batches at once. Each key was acquired and comes once.

        Returns for each batch the result [rows, vocabulary], which holds until the next call, or the error. Takes at
        most the time allowed for one call, whatever the number of batches; `take_waits` tells how long it was.
        """
        results: dict[WorkerKey, Rows | ProcessorError] = {}
        begun_s = self._clock()
        until_s = time.monotonic() + CALL_TIMEOUT_S
        waiting: dict[RemoteProcessor, ProcessorBatch] = {}
        try:
            for batch in batches:
                with self._noting(batch.key, results, begun_s):
                    processor = self._processor(batch.key)
                    processor.start(batch.logits, batch.sequences, until_s)
                    waiting[processor] = batch
            while waiting:
                for processor in _answering(list(waiting), until_s):
                    batch = waiting.pop(processor)
                    with self._noting(batch.key, results, begun_s):
                        results[batch.key] = processor.finish(len(batch.logits), until_s)
        except BaseException:  # unread replies must not be taken for later ones
            for batch in batches:
                self._fail(batch.key, ProcessorError("a step was interrupted"))
            raise
        return [results[batch.key] for batch in batches]

    def drop(self, key: WorkerKey, number: int) -> None:
        """Forgets a sequence that has ended."""
        lease = self._leases.get(key)
        if lease is not None and lease.processor is not None:
            lease.processor.drop(number)

    def take_waits(self) -> dict[str, float]:
        """Returns the seconds that `run` has waited for each client's code since the last call."""
        waits, self._waits = self._waits, {}
        return waits

    def end_idle(self) -> None:
        """Ends the workers that were idle for IDLE_S."""
        with self._lock:
            old_s = self._clock() - IDLE_S
            for lease in list(self._leases.values()):
                if lease.num_users == 0 and lease.is_settled.is_set():
                    is_gone = lease.processor is None or _has_lost_worker(lease)
                    if is_gone or lease.idle_since_s <= old_s:
                        self._end(lease)

    def close(self) -> None:
        """Ends all processes."""
        self.supervisor.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self.supervisor.workers:
            self.supervisor.end(worker)

    def _processor(self, key: WorkerKey) -> RemoteProcessor:
        """Raises ProcessorError."""
        lease = self._leases.get(key)
        if lease is None or not lease.is_settled.is_set():
            raise ProcessorError("it was not loaded")
        if lease.error is not None:
            raise lease.error
        assert lease.processor is not None
        return lease.processor

    @contextlib.contextmanager
    def _noting(
        self, key: WorkerKey, results: dict[WorkerKey, Rows | ProcessorError], begun_s: float
    ) -> Iterator[None]:
        """Makes an error the result of a key, and charges the wait to its client. Ends a worker that is lost."""
        try:
            yield
        except ProcessorError as error:
            results[key] = error
        except Lost as lost:
            why = f"it did not return within {CALL_TIMEOUT_S:g} s" if lost.is_late else str(lost)
            results[key] = ProcessorError(why)
            self._fail(key, results[key])  # type: ignore[arg-type]
            if lost.is_late:
                self.charges.suspend(key.client, why)
            elif lost.is_outside:
                self.charges.note_end(key.client)
        if key in results:
            waited_s = self._clock() - begun_s
            self._waits[key.client] = self._waits.get(key.client, 0.0) + waited_s

    def _fail(self, key: WorkerKey, error: ProcessorError) -> None:
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None:
                self._end(lease)
                lease.error = error
                self._leases[key] = lease  # who still needs it is told

    def _begin_load(self, lease: Lease) -> None:
        """Starts a thread that loads the processor. Raises Unavailable."""
        try:
            self._threads.submit(self._load, lease)
        except RuntimeError:  # what the pool could not begin it keeps: `_load` sees that the place is gone
            del self._leases[lease.key]
            raise Unavailable(
                "custom_logit_processor cannot be loaded: the system could not start a thread; try again",
                field="custom_logit_processor",
                code="custom_logit_processor_queue_full",
            ) from None

    def _load(self, lease: Lease) -> None:
        """Loads a processor; runs in a thread of its own."""
        try:
            try:
                lease.processor = self._loaded(lease)
            except Lost as lost:
                if not lost.is_outside:
                    raise
                lease.processor = self._loaded(lease)
        except Lost as lost:
            lease.error = ProcessorError(str(lost), is_rejected=not (lost.is_blameless or lost.is_outside))
            if lost.is_late and lost.has_begun:
                self.charges.suspend(lease.key.client, str(lost))
        except ProcessorError as error:
            lease.error = error
        except OSError as error:
            lease.error = ProcessorError(f"no process could be started for it: {error.strerror}")
        finally:
            with self._lock:
                if self._leases.get(lease.key) is not lease and lease.processor is not None:
                    self.supervisor.end(lease.processor.worker)  # its place was given away meanwhile
                    lease.processor = None
                lease.note_use(self._clock() if lease.num_users == 0 else None)
                lease.is_settled.set()

    def _loaded(self, lease: Lease) -> RemoteProcessor:
        """Raises ProcessorError, Lost, OSError."""
        processor = self._start_worker()
        try:
            processor.load(lease.payload)
            return processor
        except BaseException as error:
            self.supervisor.end(processor.worker)
            if isinstance(error, Lost) and error.is_outside:
                self.charges.note_end(lease.key.client)
            raise

    def _start_worker(self) -> RemoteProcessor:
        """Raises Lost, OSError."""
        if not self.supervisor.wait_ready(START_TIMEOUT_S):
            raise Lost("no worker could be started", is_blameless=True)
        rows, width = self._shape
        memory = os.memfd_create("logits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, rows * width * 4)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            shared = mmap.mmap(memory, rows * width * 4)
            worker = self.supervisor.fork([memory])
        finally:
            os.close(memory)
        return RemoteProcessor(worker, np.frombuffer(shared, dtype=np.float32).reshape(rows, width))

    def _can_seal(self) -> bool:
        """Says whether this kernel can confine a worker: one that could not be sealed ends before it answers."""
        with contextlib.suppress(ProcessorError, Lost, OSError):
            processor = self._start_worker()
            try:
                processor.worker.begin(time.monotonic() + START_TIMEOUT_S)
                return True
            finally:
                self.supervisor.end(processor.worker)
        return False

    def _make_room(self) -> None:
        """Ends an idle worker for one more. Raises Unavailable when requests need all that there are."""
        held = [lease for lease in self._leases.values() if lease.error is None]
        if len(held) < MAX_WORKERS:
            return
        idle = [lease for lease in held if lease.num_users == 0]
        if not idle:
            raise Unavailable(
                f"{MAX_WORKERS} other processors are running, the limit; try again",
                field="custom_logit_processor",
                code="custom_logit_processor_queue_full",
            )
        self._end(min(idle, key=lambda processor: processor.idle_since_s))

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.key]
        if lease.processor is not None:
            self.supervisor.end(lease.processor.worker)
            lease.processor = None


def _has_lost_worker(lease: Lease) -> bool:
    """Returns whether a worker was ended while idle, by a lack of memory or from outside."""
    worker = None if lease.processor is None else lease.processor.worker
    return worker is not None and (worker.is_killed or not worker.is_alive)


def _answering(processors: list[RemoteProcessor], until_s: float) -> list[RemoteProcessor]:
    """Returns the processors whose reply has come; after `until_s` it returns all of them."""
    by_number = {processor.worker.fileno(): processor for processor in processors}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    ready = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
    return [by_number[number] for number, _ in ready] or processors
