"""The engine's side of the jail: starts the zygote, keeps a worker for each payload, runs batches in them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tureen.errors import StartupError, echo
from tureen.jail import seccomp, wire
from tureen.log import get_logger

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 1.0
BAN_S = 60.0
MAX_BANS = 1024
MAX_WORKERS = 16

log = get_logger("jail")


class JailError(Exception):
    """A processor failed. `is_rejected`: it could not even be loaded."""

    def __init__(self, message: str, *, is_rejected: bool = False) -> None:
        super().__init__(message)
        self.is_rejected = is_rejected


class Tracked:
    """A sequence as workers know it. `output_ids` grows as tokens are drawn."""

    __slots__ = ("number", "output_ids", "params", "prompt_ids")

    def __init__(self, number: int, params: dict[str, Any], prompt_ids: list[int], output_ids: list[int]) -> None:
        self.number = number
        self.params = params
        self.prompt_ids = prompt_ids
        self.output_ids = output_ids


class Worker:
    """One process, for one payload. Not trusted: its replies have a fixed size, its memory is copied, then read."""

    def __init__(self, pid: int, connection: socket.socket, rows: Tensor) -> None:
        self.pid = pid
        self._connection = connection
        self._rows = rows
        self._copies = torch.empty_like(rows)  # out of the worker's reach; touched only as far as it is used
        self._known: dict[int, int] = {}  # sequence -> how many output tokens the worker has heard of
        self._dropped: list[int] = []

    def load(self, payload: str) -> None:
        """Raises JailError."""
        self._connection.settimeout(LOAD_TIMEOUT_S)
        wire.send(self._connection, wire.Load(payload))
        self._await(LOAD_TIMEOUT_S, "it was not loaded")
        self._connection.settimeout(CALL_TIMEOUT_S)

    def start(self, logits: Sequence[Tensor], sequences: Sequence[Tracked]) -> None:
        """Hand over rows of logits [vocabulary]."""
        for place, row in enumerate(logits):
            self._rows[place].copy_(row)
        rows, new = [], []
        for one in sequences:
            heard = self._known.get(one.number)
            if heard is None:
                new.append(wire.Sequence(one.number, one.params, one.prompt_ids, one.output_ids))
                heard = len(one.output_ids)
            rows.append((one.number, one.output_ids[heard:]))
            self._known[one.number] = len(one.output_ids)
        message = wire.Run(rows, new, self._dropped)
        self._dropped = []
        wire.send(self._connection, message)

    def finish(self, num_rows: int) -> Tensor:
        """What became of the logits: a copy that the worker cannot reach, until the next call. Raises JailError."""
        self._await(CALL_TIMEOUT_S, "it did not return")
        return self._copies[:num_rows].copy_(self._rows[:num_rows])

    def drop(self, number: int) -> None:
        if self._known.pop(number, None) is not None:
            self._dropped.append(number)

    def close(self) -> None:
        self._connection.close()

    def _await(self, timeout_s: float, late: str) -> None:
        """The worker's reply. Raises JailError; `Lost` where there is none."""
        try:
            data = self._connection.recv(wire.REPLY.size)
        except TimeoutError:
            raise Lost(f"{late} within {timeout_s:g} s") from None
        except OSError:
            data = b""
        if len(data) < wire.REPLY.size:  # a reply is sent in one piece
            raise Lost("it ended its process, or took more memory or time than it may")
        status, length, text = wire.REPLY.unpack(data)
        if status != wire.DONE:
            shown = echo(text[:length].decode(errors="replace"))[1:-1]
            raise JailError(shown, is_rejected=status == wire.REJECTED)


class Lost(JailError):
    """The worker is of no use any more."""


class Jail:
    """All workers. One thread calls all of it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        """Starts the zygote; returns when it is ready. Raises StartupError."""
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
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/", env={"PATH": os.defpath}
        )
        theirs.close()
        self._control.settimeout(START_TIMEOUT_S)
        try:
            ready = wire.receive(self._control, wire.REPLY.size)
        except TimeoutError:
            ready = None
        if ready is None:
            self.close()
            raise StartupError("--enable-custom-logit-processor: the jail for client code did not start")

    def run(self, batches: Sequence[tuple[str, Sequence[Tensor], Sequence[Tracked]]]) -> list[Tensor | JailError]:
        """Process rows of logits [vocabulary] of each payload's sequences, all payloads at once.

        Of each the result [rows, vocabulary], or why there is none. `batches` name no payload twice.
        """
        started: list[Worker | JailError] = []
        used: set[bytes] = set()
        for payload, logits, sequences in batches:
            digest = hashlib.sha256(payload.encode()).digest()
            try:
                worker = self._worker(digest, payload, used)
                worker.start(logits, sequences)
                used.add(digest)
                started.append(worker)
            except JailError as error:
                started.append(error)
            except OSError:
                started.append(self._lost(digest, Lost("its process is gone")))
        results: list[Tensor | JailError] = []
        for worker_or_error, (payload, logits, _) in zip(started, batches, strict=True):
            if isinstance(worker_or_error, JailError):
                results.append(worker_or_error)
                continue
            try:
                results.append(worker_or_error.finish(len(logits)))
            except Lost as error:
                results.append(self._lost(hashlib.sha256(payload.encode()).digest(), error))
            except JailError as error:
                results.append(error)
        return results

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

    def _worker(self, digest: bytes, payload: str, used: set[bytes]) -> Worker:
        self._check_ban(digest)
        worker = self._workers.get(digest)
        if worker is not None:
            self._workers.move_to_end(digest)
            return worker
        if len(self._workers) >= MAX_WORKERS:
            idle = next((one for one in self._workers if one not in used), None)
            if idle is None:
                raise JailError(f"{MAX_WORKERS} other processors run at this moment, the most there may be")
            self._end(idle)
        worker = self._workers[digest] = self._spawn()
        try:
            worker.load(payload)
        except Lost as error:
            raise self._lost(digest, JailError(str(error), is_rejected=True)) from None
        except JailError:
            self._end(digest)
            raise
        return worker

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
        _, length, text = wire.REPLY.unpack(reply)
        return Worker(int(text[:length]), ours, torch.frombuffer(shared, dtype=torch.float32).view(rows, width))

    def _lost(self, digest: bytes, error: JailError) -> JailError:
        """End a worker that hung or died, and refuse its payload for a while: it must not hold up others again."""
        self._end(digest)
        self._bans[digest] = (time.monotonic() + BAN_S, str(error))
        while len(self._bans) > MAX_BANS:
            self._bans.popitem(last=False)
        return error

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
