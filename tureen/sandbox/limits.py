"""Sets the limits of a worker, and gives up all its other rights."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from tureen.sandbox import seccomp
from tureen.sandbox.stacks import lower_own_stack

MAX_DESCRIPTORS = 1 << 16
MAX_FILE_BYTES = 64 << 20  # of a file that a worker writes, where it may write any


class WorkerLimits(NamedTuple):
    """The bounds of one worker."""

    memory_bytes: int  # on top of what it is born with
    cpu_s: int  # that it may compute for a message; its user grants it anew with the next one
    is_sealed: bool = False  # its rights are gone too: memory, the clock and its connection are all it has
    alarm_s: float = 0.0  # after which it ends by itself; 0 = never


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, even while it is stopped. Raises OSError.

    Linux alone can. The parent is the thread that forked this process. parent: the id of that thread's process.
    """
    if sys.platform == "linux":
        seccomp.control(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def be_expendable() -> None:
    """Makes the system end this process first if memory is short, and keep no image of its memory if it crashes."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def confine(limits: WorkerLimits, keep: int) -> None:
    """Gives up, for good, every right of this process but its limits and the descriptor `keep`. Raises OSError.

    It writes nothing to stderr from then on: a library that ends the process says why there, with pieces of what a
    client sent. See be_expendable, too.
    """
    os.chdir("/")
    be_expendable()
    size = address_space() + limits.memory_bytes
    for limit, value in ((resource.RLIMIT_AS, size), (resource.RLIMIT_FSIZE, MAX_FILE_BYTES)):
        resource.setrlimit(limit, (value, value))
    lower_own_stack()
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, resource.RLIM_INFINITY))  # its user raises the first
    signal.setitimer(signal.ITIMER_REAL, limits.alarm_s)  # its default action works in a library's code too
    if limits.is_sealed:
        _seal(keep)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def address_space(pid: int | str = "self") -> int:
    """Returns the bytes that a process has mapped. Raises OSError."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _seal(keep: int) -> None:
    os.environ.clear()
    sys.stdin = None
    _close_but([keep])
    for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, keep + 1), (resource.RLIMIT_NPROC, 0)):
        resource.setrlimit(limit, (value, value))
    seccomp.control(seccomp.PR_SET_DUMPABLE, 0)
    if not seccomp.is_supported():
        return
    seccomp.lock_in()
    with contextlib.suppress(PermissionError):
        os.open("/", os.O_RDONLY)
        os._exit(1)  # a filter that does not hold: nothing of a client may run here


def _close_but(keep: Sequence[int]) -> None:
    first = 0
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, MAX_DESCRIPTORS)
