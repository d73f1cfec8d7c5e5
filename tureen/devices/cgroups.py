"""Reads the control groups that this process is in: version 1, version 2 and both at once, with all groups around
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62


class GroupMemory(NamedTuple):
    """The bytes that a control group may use, and how many of them it uses."""

    limit: int
    used: int


def memory() -> list[GroupMemory]:
    """Returns the memory of each group around this process that has a limit: an outer one may be the tighter."""
    return [memory for folder in _folders("memory") if (memory := _memory_of(folder)) is not None]


def cpu_quotas() -> list[float]:
    """Returns the number of processors that each group around this process may use, as fractions."""
    return [quota for folder in _folders("cpu") if (quota := _quota_of(folder)) is not None]


def _memory_of(folder: Path) -> GroupMemory | None:
    names = ("memory.max", "memory.current", "inactive_file")
    if not (folder / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= UNLIMITED:
        return None
    return GroupMemory(int(limit), max(0, int(used) - int(stat.get(names[2], 0))))  # files in memory give way


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _folders(controller: str) -> Iterator[Path]:
    """Yields the folders of the groups, from the innermost to the root. In a container outer ones may not be
    visible."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [MOUNTS / "unified"] if (MOUNTS / "unified").is_dir() else [MOUNTS]
        elif controller in controllers.split(","):
            mounts = [MOUNTS / controllers, MOUNTS / controller]
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in mounts[:1] if mounts[0].is_dir() else mounts[1:]:
            yield from (mount / folder for folder in (inside, *inside.parents) if (mount / folder).is_dir())
