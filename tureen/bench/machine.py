"""Describes the machine a figure was taken on: what it is, and how fast it reads memory right now."""

from __future__ import annotations

import platform
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tureen import __version__
from tureen.devices.cpu import num_threads
from tureen.kernels.cpu.native import load

DRAM_BYTES = 256 << 20  # beyond the last cache
WEIGHTS_BYTES = 96 << 20  # what a decode step of the default model reads
PROBE_ROUNDS = 5


class MemoryReads(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s, the best of a few readings with all CPUs."""

    dram_gb_s: float
    weights_gb_s: float  # 96 MiB again and again: from the last cache, as far as they fit


def describe() -> dict[str, object]:
    """Describes the machine for the JSON. Names no user, host or path.

    `kernels`: the instruction set that ours use, in this environment.
    """
    native = load()
    return {
        "tureen": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _first_field(Path("/proc/cpuinfo"), "model name"),
        "kernels": native.isa() if native else "none",
        "cpus_usable": num_threads(),
        "memory": _first_field(Path("/proc/meminfo"), "MemTotal"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _first_field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def memory_reads() -> MemoryReads:
    """Measures now, with every CPU, in some tenths of a second: a virtual machine's share changes within seconds."""
    threads = min(num_threads(), 16)
    native = load()
    read = _read_with_numpy if native is None else native.read_bandwidth
    return MemoryReads(
        dram_gb_s=round(read(threads, DRAM_BYTES, PROBE_ROUNDS), 1),
        weights_gb_s=round(read(threads, WEIGHTS_BYTES, PROBE_ROUNDS), 1),
    )


def _read_with_numpy(threads: int, size: int, rounds: int) -> float:
    """Measures reading with numpy, where there are no native kernels; slower than what they reach."""
    arrays = [np.ones(size // threads // 8, dtype=np.int64) for _ in range(threads)]
    return max(_read_once(arrays) for _ in range(rounds))


def _read_once(arrays: list[npt.NDArray[np.int64]]) -> float:
    threads = [threading.Thread(target=array.max) for array in arrays]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(array.nbytes for array in arrays) / (time.perf_counter() - start) / 1e9
