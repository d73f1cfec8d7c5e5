"""The processors of this machine. No torch."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress
from pathlib import Path

from tureen.devices import cgroups

MEMINFO = Path("/proc/meminfo")


def num_threads() -> int:
    """Returns how many CPUs this process may use: those it may run on, within the quotas of the control groups, rounded
    up."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(present, *map(math.ceil, cgroups.cpu_quotas()), present)


def free_bytes() -> int:
    """Returns the bytes of memory that can be had without swapping, within the limits of the control groups."""
    return max(
        0, min(_meminfo("MemAvailable"), *(group.limit - group.used for group in cgroups.memory()), cgroups.UNLIMITED)
    )


def total_bytes() -> int:
    """Returns the bytes of memory of the machine, within the limits of the control groups."""
    return min(_meminfo("MemTotal"), *(group.limit for group in cgroups.memory()), cgroups.UNLIMITED)


def trim() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it (malloc_trim of glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _meminfo(name: str) -> int:
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
