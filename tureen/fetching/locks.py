"""Lets one process at a time fill a place; the others wait, and go away when its process does."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `path` meanwhile; it is gone afterwards. The lock of a killed process is free at once.

    waiting: is called once, if another process has it. Where the disk has no locks (some network disks) nothing is
    held. Raises OSError.
    """
    descriptor = _acquire(path, waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits for it sees that it is another file
        os.close(descriptor)


def _acquire(path: Path, waiting: Callable[[], None]) -> int:
    has_told = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_told:
                    waiting()
                    has_told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same(descriptor, path):
                return descriptor
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
