"""What this machine's processors offer."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def default_dtype() -> torch.dtype:
    """bfloat16 where matrix products in it are done by the hardware, else float32."""
    return torch.bfloat16 if has_fast_bfloat16() else torch.float32


def has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)


def has_fast_bfloat16() -> bool:
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def num_threads() -> int:
    """How many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group."""
    return max(0, min(_available_bytes(), _cgroup_free_bytes()))


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
