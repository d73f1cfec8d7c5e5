"""How much of a mapped file is in memory."""

from __future__ import annotations

from pathlib import Path


def resident_kib(path: Path) -> int:
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(" ")[0]:
                inside = line.rstrip().endswith(str(path))
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total
