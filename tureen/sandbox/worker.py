"""A worker as its user sees it: it is sent messages and is not trusted."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from tureen.sandbox import framing
from tureen.sandbox.fork_server import BORN, READY
from tureen.sandbox.limits import WorkerLimits

OWN_BYTES = 16 << 20
"""Bytes that a worker takes by being there, beside what it allocates: pages it shares until either side writes."""


STATUS_TIMEOUT_S = 5.0
"""Seconds that a worker whose connection is closed may take to end, or as long as its user would have waited for the
reply; and that its fork server may take to report its exit status."""


class Lost(Exception):
    """There is no reply, and the worker cannot be used any more.

    `has_begun`: the worker was ready when the message was sent. `is_late`: it took too long. `is_blameless`: the fork
    server ended too, so the message is not at fault. `is_outside`: somebody else ended it, as the system does where
    memory is short; once is no fault of the message.
    """

    def __init__(
        self,
        why: str,
        *,
        has_begun: bool = False,
        is_late: bool = False,
        is_blameless: bool = False,
        is_outside: bool = False,
    ) -> None:
        super().__init__(why)
        self.has_begun = has_begun
        self.is_late = is_late
        self.is_blameless = is_blameless
        self.is_outside = is_outside


class Worker:
    """One worker process and the connection to it. One thread at a time sends and receives; any thread may `kill`."""

    def __init__(self, connection: socket.socket, limits: WorkerLimits, is_orphan: Callable[[], bool]) -> None:
        """is_orphan: says whether the fork server that the worker comes from has ended."""
        self.limits = limits
        self.pid = 0  # until it is born
        self.has_begun = False
        self.idle_since_s: float | None = None  # its user needs it no more for now: where memory is short, it goes
        self.is_killed = False
        self.was_stopped = False  # by a signal from outside, for too long
        self._status: int | None = None  # of its exit; negative: the signal that ended it
        self._has_status = threading.Event()
        self._connection = connection
        self._is_orphan = is_orphan
        self._process = -1
        self._born_bytes = 0

    def begin(self, until_s: float) -> None:
        """Waits until the worker is confined. Raises Lost past `until_s` of the monotonic clock."""
        if self.has_begun:
            return
        try:
            self._connection.settimeout(max(0.001, until_s - time.monotonic()))
            said, descriptors, _, _ = socket.recv_fds(self._connection, BORN.size, 1)
            if len(said) < BORN.size or not descriptors:
                raise Lost("it was not started", is_blameless=True)
            self._process = descriptors[0]
            (self.pid,) = BORN.unpack(said)
            self._born_bytes = _anonymous_bytes(self.pid)
            if self.is_killed:
                self.kill()
            self._connection.settimeout(max(0.001, until_s - time.monotonic()))
            self.has_begun = self._connection.recv(len(READY)) == READY
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            raise Lost("it was not started in time", is_late=is_late, is_blameless=True) from None
        if not self.has_begun:
            raise Lost("it was not started", is_blameless=True)

    def call(self, *parts: bytes, timeout_s: float) -> bytes:
        """Sends a message made of these parts and waits for the reply. Raises Lost."""
        until_s = time.monotonic() + timeout_s
        self.begin(until_s)
        self.send(*parts, until_s=until_s)
        return self.receive(until_s)

    def send(self, *parts: bytes, until_s: float) -> None:
        """Sends a message, and grants processor time to compute the reply. Raises Lost."""
        self._grant_cpu()
        with self._losing(until_s):
            framing.send(self._connection, *parts, until_s=until_s)

    def try_send(self, message: bytes) -> bool:
        """Sends a small message to a worker that has begun and is idle, without blocking. Returns False if the worker
        does not take the message."""
        self._grant_cpu()
        with contextlib.suppress(OSError):
            self._connection.settimeout(0)
            self._connection.sendall(framing.framed(message))
            return True
        return False

    def has_reply(self, max_bytes: int) -> bool:
        """Returns whether a whole reply of at most `max_bytes` has arrived, without blocking."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(0)
            arrived = self._connection.recv(framing.HEADER.size + max_bytes, socket.MSG_PEEK)
            return framing.is_whole(arrived)
        return False

    def receive(self, until_s: float, max_bytes: int = framing.MAX_MESSAGE_BYTES) -> bytes:
        """Reads the reply. Raises Lost."""
        with self._losing(until_s):
            reply = framing.receive(self._connection, max_bytes, until_s=until_s)
        if reply is None:
            raise self._ended("it ended its process, or exceeded its memory or time", until_s)
        return reply

    def note_end(self, status: int) -> None:
        """Notes the exit status that the fork server reports."""
        self._status = status
        self._has_status.set()

    def fileno(self) -> int:
        """Returns the connection's descriptor: it can be read when a reply comes."""
        return self._connection.fileno()

    def wait_readable(self, timeout_s: float) -> bool:
        """Waits for a reply, or for the worker's end; returns False where neither came in time."""
        return bool(readable(timeout_s, self._connection.fileno()))

    @property
    def cpu_s(self) -> float:
        """Returns the seconds of processor time that the worker has taken, by the clock of clock_getcpuclockid(3)."""
        with contextlib.suppress(OSError):  # it has ended
            return time.clock_gettime(~self.pid << 3 | 2) if self.pid else 0.0
        return 0.0

    @property
    def is_alive(self) -> bool:
        """Says whether neither the worker nor its fork server, with which it ends, has ended. A worker that is not
        forked yet counts as alive."""
        if self._is_orphan():
            return False
        return self._process < 0 or not readable(0, self._process)

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes that the worker has taken since its start. Memory that it shares with the fork server does
        not count."""
        return OWN_BYTES + max(0, _anonymous_bytes(self.pid) - self._born_bytes) if self.pid else 0

    def kill(self) -> None:
        """Ends the process. Who waits for its reply is told that it is lost."""
        self.is_killed = True
        with contextlib.suppress(OSError):
            if self._process >= 0:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process, and frees what belongs to it here. No caller may wait for its reply."""
        self.kill()
        self._connection.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _grant_cpu(self) -> None:
        """Raises the worker's limit with the messages it gets, so that it cannot compute for long between them."""
        with contextlib.suppress(OSError):  # it is gone: the message will tell
            allowed_s = math.ceil(self.cpu_s + self.limits.cpu_s)
            resource.prlimit(self.pid, resource.RLIMIT_CPU, (allowed_s, resource.RLIM_INFINITY))

    @contextlib.contextmanager
    def _losing(self, until_s: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise Lost("it did not answer in time", has_begun=self.has_begun, is_late=True) from None
        except framing.Oversized as error:
            raise Lost(str(error), has_begun=self.has_begun) from None
        except OSError:
            raise self._ended("its process is gone", until_s) from None

    def _ended(self, why: str, until_s: float) -> Lost:
        """Returns the error for a worker whose end of the connection is closed."""
        if self._was_ended_by_others(until_s):
            return Lost("its process was killed", has_begun=self.has_begun, is_outside=True)
        return Lost(why, has_begun=self.has_begun, is_blameless=self._is_orphan())

    def _was_ended_by_others(self, until_s: float) -> bool:
        """Says whether SIGKILL came from outside: nothing here sends it without noting it, no limit does, and no sealed
        worker can."""
        if self.was_stopped or self.is_killed or self._is_orphan():
            return self.was_stopped
        timeout_s = max(0.0, min(STATUS_TIMEOUT_S, until_s - time.monotonic()))
        if self._process < 0 or not readable(timeout_s, self._process):
            return False  # it closed the connection itself
        return self._has_status.wait(timeout_s) and self._status == -signal.SIGKILL and not self._is_orphan()


def readable(timeout_s: float, *descriptors: int) -> set[int]:
    """Return the descriptors that can be read within `timeout_s`. A closed connection and an ended process count.

    Unlike select(2), poll(2) takes descriptors above 1023, which a server with many connections has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * timeout_s)}


def _anonymous_bytes(pid: int) -> int:
    """Returns the memory of a process that no file backs; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            sizes = dict(line.split(b":", 1) for line in file if line.startswith((b"RssAnon", b"RssShmem")))
    except OSError:
        return 0
    return sum(int(size.split()[0]) << 10 for size in sizes.values())
