"""The engine's side of the jail: starts the zygote, keeps a worker for each payload, runs batches in them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import resource
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError, echo
from tureen.jail import seccomp, wire
from tureen.log import get_logger

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 1.0
BAN_S = 60.0
MAX_BANS = 1024
MAX_WORKERS = 16
CALL_ALLOWANCE_S = 0.0001  # CPU time of a call that is spent after its reply
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""No process of the jail can start threads; libraries that mean to would wait for them."""

Rows = NDArray[np.float32]

log = get_logger("jail")


class JailError(Exception):
    """A processor failed. `is_rejected`: it could not even be loaded."""

    def __init__(self, message: str, *, is_rejected: bool = False) -> None:
        super().__init__(message)
        self.is_rejected = is_rejected


class Raised(JailError):
    """The processor raised, or returned what is no logits; its worker goes on."""


class Lost(JailError):
    """The worker is of no use any more."""


class Tracked:
    """A sequence as workers know it. `output_ids` grows as tokens are drawn."""

    __slots__ = ("number", "output_ids", "params", "prompt_ids")

    def __init__(self, number: int, params: dict[str, Any], prompt_ids: list[int], output_ids: list[int]) -> None:
        self.number = number
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids


def digest_of(payload: str) -> bytes:
    return hashlib.sha256(payload.encode()).digest()


class Batch(NamedTuple):
    """Rows of logits [vocabulary] of sequences whose requests sent the same payload."""

    digest: bytes  # of the payload
    payload: str
    logits: Sequence[Rows]
    sequences: Sequence[Tracked]


class Worker:
    """One process, for one payload. Not trusted: its replies have a fixed size, its memory is copied, then read."""

    def __init__(self, pid: int, connection: socket.socket, rows: Rows) -> None:
        self.pid = pid
        self._connection = connection
        self._rows = rows
        self._copies = np.empty_like(rows)  # out of the worker's reach; touched only as far as it is used
        self._known: dict[int, int] = {}  # sequence -> how many output tokens the worker has heard of
        self._dropped: list[int] = []
        self._number = 0  # of the newest message; a reply names the one it answers
        self._cpu_spent_s = 0.0  # at most so much, unless it computes between calls
        self._cpu_allowed_s = wire.CPU_STEP_S

    def start_load(self, payload: str) -> None:
        """Raises Lost."""
        self._send(wire.Load(payload), LOAD_TIMEOUT_S)

    def finish_load(self, until_s: float) -> None:
        """Raises JailError."""
        self._await(until_s, f"it was not loaded within {LOAD_TIMEOUT_S:g} s")

    def start(self, logits: Sequence[Rows], sequences: Sequence[Tracked]) -> None:
        """Hand over rows of logits [vocabulary]. Raises Lost."""
        self._allow_cpu_time()
        for place, row in enumerate(logits):
            self._rows[place] = row
        rows, new = [], []
        for one in sequences:
            heard = self._known.get(one.number)
            if heard is None:
                params = msgspec.json.encode(one.params)
                new.append(wire.Sequence(one.number, params, one.prompt_ids, one.output_ids))
                heard = len(one.output_ids)
            rows.append((one.number, one.output_ids[heard:]))
            self._known[one.number] = len(one.output_ids)
        self._number += 1
        message = wire.Run(self._number, rows, new, self._dropped)
        self._dropped = []
        self._send(message, CALL_TIMEOUT_S)

    def finish(self, num_rows: int, until_s: float) -> Rows:
        """What became of the logits: a copy that the worker cannot reach, until the next call. Raises JailError."""
        self._await(until_s, f"it did not return within {CALL_TIMEOUT_S:g} s")
        copies = self._copies[:num_rows]
        np.copyto(copies, self._rows[:num_rows])
        return copies

    def drop(self, number: int) -> None:
        if self._known.pop(number, None) is not None:
            self._dropped.append(number)

    def close(self) -> None:
        self._connection.close()

    def _send(self, message: wire.ToWorker, timeout_s: float) -> None:
        self._sent_s = time.monotonic()
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(wire.encode(message))
        except OSError:
            raise Lost("its process is gone, or does not listen") from None

    def _await(self, until_s: float, late: str) -> None:
        """The reply to the newest message. Raises JailError; `Lost` where there is none."""
        self._connection.settimeout(max(0.001, until_s - time.monotonic()))
        try:
            data = self._connection.recv(wire.REPLY.size)
        except TimeoutError:
            raise Lost(late) from None
        except OSError:
            data = b""
        self._cpu_spent_s += time.monotonic() - self._sent_s + CALL_ALLOWANCE_S
        if len(data) < wire.REPLY.size:  # a reply is sent in one piece
            raise Lost("it ended its process, or took more memory or time than it may")
        number, status, length, text = wire.REPLY.unpack(data)
        if number != self._number or status not in (wire.DONE, wire.FAILED, wire.REJECTED):
            raise Lost("it answered out of turn")
        if status != wire.DONE:
            shown = echo(text[:length].decode(errors="replace"))[1:-1]
            raise Raised(shown) if status == wire.FAILED else JailError(shown, is_rejected=True)

    def _allow_cpu_time(self) -> None:
        """Raise the process's limit with the calls it gets, so that it cannot compute for long between them."""
        if self._cpu_allowed_s - self._cpu_spent_s < wire.CPU_STEP_S / 2:
            self._cpu_allowed_s += wire.CPU_STEP_S
            with contextlib.suppress(OSError):  # it is gone: the call will tell
                resource.prlimit(self.pid, resource.RLIMIT_CPU, (self._cpu_allowed_s, resource.RLIM_INFINITY))


class Jail:
    """All workers. One thread calls all of it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        """Starts the zygote; returns when a worker could be locked in. Raises StartupError."""
        if not seccomp.is_supported():
            raise StartupError(
                "--enable-custom-logit-processor needs Linux on x86-64 or aarch64: client code runs in a seccomp jail"
            )
        self._shape = (max_rows, vocab_size)
        self._workers: OrderedDict[bytes, Worker] = OrderedDict()
        self._bans: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-m", "tureen.jail.zygote", str(theirs.fileno())]
        self._zygote = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=ENVIRONMENT,
            start_new_session=True,  # a Ctrl-C is for the server, which drains first
        )
        theirs.close()
        self._control.settimeout(START_TIMEOUT_S)
        try:
            ready = wire.receive(self._control, wire.REPLY.size)
        except OSError:
            ready = None
        if ready is None or not self._can_lock_in():
            self.close()
            raise StartupError("--enable-custom-logit-processor: the jail for client code did not start")

    def run(self, batches: Sequence[Batch]) -> list[Rows | JailError]:
        """Process the rows of all batches at once; no digest comes twice.

        Of each the result [rows, vocabulary], which holds until the next call, or why there is none. Takes at most the
        time for one load and one call, whatever the number of batches.
        """
        results: dict[bytes, Rows | JailError] = {}
        try:
            self._make_ready(batches, results)
            calls = [batch for batch in batches if batch.digest not in results]
            for batch in calls:
                with self._noting(batch.digest, results):
                    self._workers[batch.digest].start(batch.logits, batch.sequences)
            until_s = time.monotonic() + CALL_TIMEOUT_S
            for batch in calls:
                if batch.digest not in results:
                    with self._noting(batch.digest, results):
                        results[batch.digest] = self._workers[batch.digest].finish(len(batch.logits), until_s)
        except BaseException:  # replies that nobody has read must not be taken for later ones
            for batch in batches:
                self._end(batch.digest)
            raise
        return [results[batch.digest] for batch in batches]

    def _make_ready(self, batches: Sequence[Batch], results: dict[bytes, Rows | JailError]) -> None:
        """A loaded worker for each batch, or an error in `results`. Workers that run already come first."""
        needed = {batch.digest for batch in batches}
        loading: list[bytes] = []
        for batch in batches:
            if batch.digest in self._workers:
                self._workers.move_to_end(batch.digest)
                continue
            with self._noting(batch.digest, results, is_load=True):
                self._check_ban(batch.digest)
                self._make_room(needed)
                worker = self._workers[batch.digest] = self._spawn()
                worker.start_load(batch.payload)
                loading.append(batch.digest)
        until_s = time.monotonic() + LOAD_TIMEOUT_S
        for digest in loading:
            with self._noting(digest, results, is_load=True):
                self._workers[digest].finish_load(until_s)

    @contextlib.contextmanager
    def _noting(
        self, digest: bytes, results: dict[bytes, Rows | JailError], *, is_load: bool = False
    ) -> Iterator[None]:
        """A JailError becomes the result. A worker that is lost, or has nothing loaded, ends."""
        try:
            yield
        except JailError as error:
            results[digest] = error
            if isinstance(error, Lost):
                self._ban(digest, error)
                error.is_rejected = is_load
            if is_load or isinstance(error, Lost):
                self._end(digest)

    def drop(self, number: int) -> None:
        """This sequence has ended."""
        for worker in self._workers.values():
            worker.drop(number)

    def close(self) -> None:
        """End the zygote and all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._control.close()
        try:
            self._zygote.wait(5)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()

    def _make_room(self, needed: set[bytes]) -> None:
        """For one more worker. Raises JailError when those that are there all run in this step."""
        if len(self._workers) < MAX_WORKERS:
            return
        idle = next((one for one in self._workers if one not in needed), None)
        if idle is None:
            raise JailError(f"{MAX_WORKERS} other processors run at this moment, the most there may be")
        self._end(idle)

    def _can_lock_in(self) -> bool:
        """Whether this kernel holds a worker: one that could not lock itself in ends before it answers."""
        worker = self._spawn()
        self._workers[b""] = worker
        try:
            worker.start_load("")
            worker.finish_load(time.monotonic() + START_TIMEOUT_S)
        except JailError as error:
            return not isinstance(error, Lost)
        finally:
            self._end(b"")
        return False

    def _spawn(self) -> Worker:
        rows, width = self._shape
        memory = os.memfd_create("logits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, rows * width * 4)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        shared = mmap.mmap(memory, rows * width * 4)
        ours, theirs = socket.socketpair()
        try:
            wire.send(self._control, wire.Spawn(rows, width), [theirs.fileno(), memory])
            reply = wire.receive(self._control, wire.REPLY.size)
        except OSError:
            reply = None
        finally:
            theirs.close()
            os.close(memory)
        if reply is None:
            raise JailError("the jail does not run any more; the server must be restarted")
        _, _, length, text = wire.REPLY.unpack(reply)
        return Worker(int(text[:length]), ours, np.frombuffer(shared, dtype=np.float32).reshape(rows, width))

    def _ban(self, digest: bytes, error: JailError) -> None:
        """Refuse a payload whose worker hung or died for a while: it must not hold up others again."""
        self._bans[digest] = (time.monotonic() + BAN_S, str(error))
        while len(self._bans) > MAX_BANS:
            self._bans.popitem(last=False)

    def _check_ban(self, digest: bytes) -> None:
        until_s, why = self._bans.get(digest, (0.0, ""))
        if until_s > time.monotonic():
            raise JailError(f"{why}; it is refused for {BAN_S:g} s from then on", is_rejected=True)

    def _end(self, digest: bytes) -> None:
        worker = self._workers.pop(digest, None)
        if worker is not None:
            worker.close()
            with contextlib.suppress(OSError):
                wire.send(self._control, wire.Kill(worker.pid))
