"""What this machine's processors offer. No torch."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def num_threads() -> int:
    """How many CPUs this process may use: those it may run on, within the quota of the control group, rounded up."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except OSError:
        return present
    return present if quota == "max" else min(present, math.ceil(int(quota) / int(period)))


def free_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group."""
    return max(0, min(_available_bytes(), _cgroup_free_bytes()))


def trim() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (malloc_trim of glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _available_bytes() -> int:
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_free_bytes() -> int:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    return (1 << 62) if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
