"""Regular files, and nothing else: what a setting or a request names may be a pipe or a device, and is then not opened.

To open a pipe waits for somebody to write; to open a device can do anything, and some never end.

Imports: nothing.
Imported by: all.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Final

OPEN: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags with which a file that has become a pipe or a device since it was looked at neither blocks nor takes a
terminal."""
KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class NotRegular(OSError):
    """The path is something else than a file with bytes in it; `strerror` says what."""


def open_regular(path: str | Path, *, no_link: bool = False, dir_fd: int | None = None) -> io.BufferedReader:
    """The file, to be read. no_link: nor may the path's last part be a symbolic link.

    Raises OSError, NotRegular for what is not a regular file, ValueError for what no file can be called.
    """
    _check(os.stat(path, dir_fd=dir_fd, follow_symlinks=not no_link), path)
    descriptor = os.open(path, OPEN | (os.O_NOFOLLOW if no_link else 0), dir_fd=dir_fd)
    try:
        _check(os.fstat(descriptor), path)  # another file may have come between
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path) -> bytes:
    """All of it. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | Path, *, errors: str = "strict") -> str:
    """All of it, as UTF-8, lines ending with a newline. Raises as `open_regular` does, and UnicodeDecodeError."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors=errors) as file:
        return file.read()


def check_regular_below(folder: Path) -> None:
    """For libraries that open a folder's files themselves. Raises OSError, NotRegular naming the first that is neither
    a file nor a folder."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            _check(path.stat(), path)


def _check(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        raise NotRegular(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
