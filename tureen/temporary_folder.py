"""Temporary folders that the next start removes if their owner was killed.

Imports: nothing.
Imported by: admin, bench, cli, runner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "tureen_"
"""Folders of versions without locks began with `tureen-`. Their owners may still run."""

NAME = re.compile(rf"{PREFIX}[a-z]+_[a-z0-9_]{{8}}")
MARK = ".tureen-temporary"
"""A file in each folder of this module, so that no folder of the user's is taken for one."""

OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class TemporaryFolder:
    """A folder that only this user can open. A lock on it, which the kernel releases when this process ends, shows that
    it is in use."""

    def __init__(self, kind: str) -> None:
        """Remove the folders of owners that were killed, then make this one. kind: part of its name. Raises OSError."""
        _remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}_"))
        self._lock = os.open(self.path, OPEN)
        with contextlib.suppress(OSError):  # without locks, no process takes a folder for unused
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / MARK).touch()  # last: without it no other start removes the folder

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_leftovers() -> None:
    """Remove the folders of this user whose owners have ended. Follow no symbolic link."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # it is in use, another user's, a link, not made here, or gone
            descriptor = os.open(path, OPEN)
            try:
                os.stat(MARK, dir_fd=descriptor, follow_symlinks=False)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
