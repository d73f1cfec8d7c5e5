"""A child process that reads strangers' files and may be lost: its limits, and what its parent learns from it."""

from __future__ import annotations

import os
import resource
import sys
from typing import Final

from tureen.devices.cpu import free_bytes
from tureen.sandbox.limits import be_expendable

BEGUN: Final = b"begun\n"
"""The end of what such a process prints. What it printed before says why it has not begun."""
OUT_OF_MEMORY: Final = 86
"""Its exit status after a MemoryError."""
LEAST_DATA_BYTES: Final = 1 << 30
"""Bytes that it may allocate however little memory is free. Large tokenizers take some hundred MiB."""


def begin() -> None:
    """Limits this process, tells its parent that it has begun, and closes its output. Call it after all imports.

    It may allocate half of the memory that is free now, so that it alone never makes memory short. Files that are
    mapped for reading do not count: weights of any size can be read.
    """
    be_expendable()
    if sys.platform == "linux":  # other systems do not count anonymous mappings
        with open("/proc/self/statm", "rb") as file:
            present = int(file.read().split()[5]) * resource.getpagesize()
        limit = present + max(free_bytes() // 2, LEAST_DATA_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), BEGUN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (sys.stdout, sys.stderr):
        os.dup2(nowhere, output.fileno())
