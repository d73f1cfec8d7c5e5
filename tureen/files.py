"""Opens regular files and nothing else: a path in a setting or a request may be that of a pipe or a device.

Opening a pipe waits for somebody to write; opening a device can do anything, and some never end.

Imports: nothing.
Imported by: all.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


MAX_BYTES: Final = 32 << 20
"""Default limit for a file that is read whole: the largest index of a real checkpoint has 10 MB."""
PART: Final = ".part"
"""End of the name of a file that is not whole yet."""
PIECE_BYTES, MAX_PIECES = 1 << 16, 64
"""The parts of a file that a sample of it has."""


class TooLarge(OSError):
    """The file has more bytes than are read of it."""


class NotRegular(OSError):
    """The path is that of something other than a regular file; `strerror` says what it is."""


def open_regular(path: str | Path, *, no_link: bool = False, dir_fd: int | None = None) -> io.BufferedReader:
    """Opens a regular file for reading.

    no_link: refuses a path whose last part is a symbolic link. dir_fd: the open folder that a relative path starts
    from.

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


def read_regular(path: str | Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns all bytes of a regular file. Raises as `open_regular` does, and TooLarge."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TooLarge(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content


def read_text(path: str | Path, *, errors: str = "strict", max_bytes: int = MAX_BYTES) -> str:
    """Returns a regular file's text, decoded as UTF-8, its lines ending with a newline.

    Raises as `read_regular` does, and UnicodeDecodeError.
    """
    content = io.BytesIO(read_regular(path, max_bytes=max_bytes))
    with io.TextIOWrapper(content, encoding="utf-8", errors=errors) as file:
        return file.read()


def check_regular_below(folder: Path) -> None:
    """Checks a folder for a library that opens its files itself.

    Raises OSError, NotRegular naming the first entry that is neither a file nor a folder.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            _check(path.stat(), path)


def _check(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
        raise NotRegular(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def sample_digest(path: Path) -> bytes:
    """Returns the digest of a file's size, and of parts of it that lie evenly: reading all of it can take minutes.
    Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d" % size)
        step = max(PIECE_BYTES, -(-size // MAX_PIECES))
        for place in range(0, size, step):
            file.seek(place)
            digest.update(file.read(PIECE_BYTES))
    return digest.digest()


@contextmanager
def replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """Write a file as a whole: until the block ends without an error, others see the earlier one or none.

    Only its owner may open it. A process that is killed leaves a file `.*.part` beside it. Raise OSError.
    """
    descriptor, part = tempfile.mkstemp(prefix=".", suffix=PART, dir=path.parent)
    try:
        with _owned(descriptor) as file:
            yield file
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may open. Raise FileExistsError if there is one, and other OSErrors."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with _owned(descriptor) as file:
            file.write(content)
    except OSError:  # the next start must not take half a file for a whole one
        path.unlink()
        raise


def _owned(descriptor: int) -> io.BufferedWriter:
    try:
        return open(descriptor, "wb")
    except BaseException:
        os.close(descriptor)
        raise
