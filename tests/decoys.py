"""Files named like modules, for the current folder of a process: none may be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

DECOY = """
import os
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
os._exit(99)
"""


class Decoys:
    """A folder of decoys, of which each notes that it was imported and ends its process."""

    def __init__(self, folder: Path, *, without: Collection[str] = ()) -> None:
        self.folder = folder / "decoys"
        self.folder.mkdir()
        self._marker = folder / "imported"
        names = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
        for name in names - {*without, "tureen"}:
            (self.folder / f"{name}.py").write_text(DECOY.format(marker=str(self._marker)))

    @property
    def imported(self) -> list[str]:
        return self._marker.read_text().split() if self._marker.exists() else []


@cache
def imported_by_python() -> set[str]:
    """The modules that `python -m` itself imports, before any code of tureen runs."""
    command = [sys.executable, "-P", "-c", "import runpy, sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
