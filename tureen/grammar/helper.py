"""Processes that do what may hang or run out of memory: how they are started, and how they bound themselves."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Sequence

ENVIRONMENT = {"PATH": os.defpath} | dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""One that forks must have no threads."""


def start(program: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run Python with these arguments, then the descriptors, which it inherits. Raises OSError. Does not wait.

    It stays in our session: with Linux' autogroups, a lower priority counts only between processes of one session.
    """
    return subprocess.Popen(
        [sys.executable, "-I", *program, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=ENVIRONMENT,
        process_group=0,  # a Ctrl-C is for the server, which drains first
    )


def confine(memory_bytes: int) -> None:
    """Take at most so much more memory from now on, go first where memory is short, and say nothing on stderr.

    A library that ends the process says why there, with pieces of what a client sent.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    size = address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def memory_with(data: bytes) -> int:
    """A file in memory: its descriptor. Raises OSError."""
    descriptor = os.memfd_create("tureen-grammar")
    overwrite(descriptor, data)
    return descriptor


def overwrite(descriptor: int, data: bytes) -> None:
    """Replace what a file holds. Raises OSError."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)


def contents(descriptor: int) -> bytes:
    """All of a file in memory, wherever its position is."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
