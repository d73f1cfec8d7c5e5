"""The machine a figure was taken on: what it is, and how fast it reads memory right now."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tureen import __version__

PROBE_BYTES = 64 << 20  # a thread; beyond any last-level cache
PROBE_ROUNDS = 3


def describe() -> dict[str, object]:
    """For the JSON. Names no user, host or path."""
    return {
        "tureen": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _first_field(Path("/proc/cpuinfo"), "model name"),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory": _first_field(Path("/proc/meminfo"), "MemTotal"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _first_field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def memory_read_gb_s() -> float:
    """Speed of reading main memory with every CPU: best of a few rounds, in some tens of milliseconds.

    A virtual machine's share of it can change twofold within seconds.
    """
    threads = min(len(os.sched_getaffinity(0)), 16)
    arrays = [np.ones(PROBE_BYTES // 8, dtype=np.int64) for _ in range(threads)]
    return round(max(_read_once(arrays) for _ in range(PROBE_ROUNDS)), 1)


def _read_once(arrays: list[npt.NDArray[np.int64]]) -> float:
    threads = [threading.Thread(target=array.max) for array in arrays]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(arrays) * PROBE_BYTES / (time.perf_counter() - start) / 1e9
