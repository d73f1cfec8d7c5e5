"""Keeps KV pages as files, one a page: within a quota, the one used longest ago goes first. States are kept like pages.

A file is HEAD, the page's key, the SHA-256 of all that and of the page, and the page. Its name is the key, which is a
digest of everything that the bytes depend on: several processes may share a folder. A file that is not exactly as it
was written is removed and is not there. Nothing waits for the disk: what a machine without power loses is not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tureen.contract.runner import KvSizes
from tureen.errors import StartupError
from tureen.files import PART, open_regular
from tureen.kv_offload.disk_thread import beat

HEAD: Final = b"tureen kv page 1"
KEY_BYTES: Final = 32
PREFIX_BYTES: Final = len(HEAD) + KEY_BYTES + 32
LEFT_SHARE: Final = 0.9
"""Share of the quota that is left where pages had to go: the folder is read through then."""
USAGE_BYTES, ID_BYTES = 8, 8
"""Bytes of the file `usage`: how many bytes the pages have, and what tells the folder from others."""
FOLDER_NAME: Final = re.compile("[0-9a-f]{2}")
PAGE_NAME: Final = re.compile("[0-9a-f]{64}")
PART_NAME: Final = re.compile(rf"\.[0-9]+-[0-9]+{re.escape(PART)}")
"""Names of what is written here. What has another name is somebody's, and neither counted nor removed."""
STALE_S: Final = 600.0
"""Age from which a file that is not finished is one of a process that was killed."""


class NoPage(Exception):
    """There is no such page."""


class DamagedPage(NoPage):
    """Its file was not as it was written. `is_removed`: it is gone now, which a disk may refuse."""

    def __init__(self, *, is_removed: bool) -> None:
        self.is_removed = is_removed


class PageFiles:
    """Pages of any sizes in a folder. Threads and processes may share it."""

    def __init__(self, folder: Path, *, sizes: KvSizes, max_bytes: int) -> None:
        """Makes the folder if it is missing. sizes: of what must fit together. Raises StartupError."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._numbers = itertools.count()
        self._last_ns = 0
        _check_room(sizes, max_bytes)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(folder, folder.lstat())
            with self._usage():  # it can be written
                self.folder_id = _id_of(folder / "usage")
        except OSError as error:
            raise StartupError(f"--kv-disk {folder}: cannot use it: {error.strerror}", field="kv_disk") from None

    @property
    def num_bytes(self) -> int:
        """The bytes of all files, as far as is known without looking at them."""
        with suppress(OSError), self._usage() as usage:
            return usage.num_bytes
        return 0

    def recount(self) -> None:
        """Counts the files again, and removes what killed processes left. Raises OSError."""
        with self._usage() as usage:
            self._make_room(usage, 0)

    def has(self, key: bytes) -> bool:
        """Says whether there is a file of this page; it may still be damaged."""
        is_there = os.path.exists(self._path(key))
        beat()
        return is_there

    def read(self, key: bytes, into: memoryview) -> None:
        """Reads a page into memory of its size. Raises NoPage, DamagedPage; OSError where the disk fails."""
        path = self._path(key)
        prefix = bytearray(PREFIX_BYTES)
        try:
            with open_regular(path, no_link=True) as file:
                is_whole = os.fstat(file.fileno()).st_size == PREFIX_BYTES + into.nbytes
                is_whole = is_whole and _fill(file.fileno(), [memoryview(prefix), into])
        except FileNotFoundError:
            raise NoPage from None
        if not is_whole or prefix != HEAD + key + _sum(key, into):
            raise DamagedPage(is_removed=self.remove(key))

    def write(self, key: bytes, page: memoryview) -> int:
        """Writes a page; returns how many others went for it. Raises OSError when it cannot be written."""
        path, file_bytes = self._path(key), PREFIX_BYTES + page.nbytes
        with self._usage() as usage:
            num_evicted = 0
            if usage.num_bytes + file_bytes > self._max_bytes:
                num_evicted = self._make_room(usage, file_bytes)
            usage.num_bytes += file_bytes
        is_new = False
        try:
            is_new = self._write(path, key, page)
        finally:
            if not is_new:
                with suppress(OSError), self._usage() as usage:
                    usage.num_bytes -= file_bytes
        return num_evicted

    def touch(self, keys: Iterable[bytes]) -> None:
        """Makes pages the ones used last, in this order. One that is gone is passed over."""
        for key in keys:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            with suppress(OSError):
                os.utime(self._path(key), ns=(self._last_ns, self._last_ns))
                beat()

    def remove(self, key: bytes) -> bool:
        """Removes a page, if it is there. Returns whether it did."""
        try:
            path = self._path(key)
            size = os.stat(path).st_size
            os.unlink(path)
        except OSError:
            return False
        with suppress(OSError), self._usage() as usage:
            usage.num_bytes -= size
        return True

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"  # not by Path: the engine's thread looks for each page of a prompt

    def _write(self, path: str, key: bytes, page: memoryview) -> bool:
        """Writes a page; returns False where another writer of it was first. Raises OSError."""
        part = Path(path).with_name(f".{os.getpid()}-{next(self._numbers)}{PART}")
        part.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for piece in (memoryview(HEAD + key + _sum(key, page)), page):
                    rest = piece
                    while rest:
                        rest = rest[file.write(rest) :]
            with self._usage():  # one writer at a time
                is_new = not os.path.exists(path)
                os.rename(part, path)  # others see the whole file or none
            return is_new
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @contextmanager
    def _usage(self) -> Iterator[_FolderUse]:
        """Gives the number of bytes in use, which may be changed, to one process and thread at a time."""
        descriptor = os.open(self._folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = int.from_bytes(os.pread(descriptor, USAGE_BYTES, 0), "little")
            usage = _FolderUse(before)
            try:
                yield usage
            finally:
                if usage.num_bytes != before:
                    os.pwrite(descriptor, max(0, usage.num_bytes).to_bytes(USAGE_BYTES, "little"), 0)
        finally:
            os.close(descriptor)

    def _make_room(self, usage: _FolderUse, more: int) -> int:
        """Removes pages, the one used longest ago first, until LEFT_SHARE of the quota is in use with `more` bytes
        more. Does nothing where the quota is kept. Returns how many went."""
        files = sorted(self._files())
        usage.num_bytes = sum(size for _, size, _ in files)
        if usage.num_bytes + more <= self._max_bytes:
            return 0
        most = max(int(self._max_bytes * LEFT_SHARE), more) - more
        num_removed = 0
        for _, size, path in files:
            if usage.num_bytes <= most:
                break
            with suppress(OSError):
                os.unlink(path)
                beat()
                num_removed += 1
            usage.num_bytes -= size
        return num_removed

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yields the time of the last use, the size and the path of every page, those of other models too."""
        stale_ns = time.time_ns() - int(STALE_S * 1e9)
        for folder in os.scandir(self._folder):
            if not FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    beat()
                    if PAGE_NAME.fullmatch(entry.name) and not stat.S_ISDIR(status.st_mode):
                        yield status.st_mtime_ns, status.st_size, entry.path
                    elif PART_NAME.fullmatch(entry.name) and status.st_mtime_ns < stale_ns:
                        os.unlink(entry.path)


class _FolderUse:
    """How many bytes the files have."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def _check_room(sizes: KvSizes, max_bytes: int) -> None:
    """Raises StartupError unless a page fits, with its window page and the state after it if there are such."""
    least, what = PREFIX_BYTES + sizes.page, "one page"
    if sizes.window:
        least, what = least + PREFIX_BYTES + sizes.window, f"{what} with that of the layers with a window,"
    if sizes.state:
        least, what = least + PREFIX_BYTES + sizes.state, f"{what} with the state of the recurrent layers after it,"
    if least > max_bytes:
        raise StartupError(
            f"--kv-disk-size {max_bytes} is less than {what} of {least} bytes; raise it, or lower --page-size",
            field="kv_disk_size",
        )


def check_own(folder: Path, status: os.stat_result) -> None:
    """Raises StartupError unless it is a folder that only this user may read and change."""
    if not stat.S_ISDIR(status.st_mode):
        raise StartupError(f"--kv-disk: {folder} is not a folder; move it away", field="kv_disk")
    if status.st_uid != os.geteuid():
        raise StartupError(
            f"--kv-disk: {folder} belongs to another user, who could change what is read from it; name another folder",
            field="kv_disk",
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartupError(
            f"--kv-disk: {folder}: others on this machine may read or change it; run chmod 700 on it", field="kv_disk"
        )


def _id_of(usage: Path) -> str:
    """Returns what tells a folder from others, and is the same for all who share it. To be called by one at a time.
    Raises OSError."""
    descriptor = os.open(usage, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        number = os.pread(descriptor, ID_BYTES, USAGE_BYTES)
        if len(number) < ID_BYTES:
            number = os.urandom(ID_BYTES)
            os.pwrite(descriptor, number, USAGE_BYTES)
    finally:
        os.close(descriptor)
    return number.hex()


def _sum(key: bytes, page: memoryview) -> bytes:
    digest = hashlib.sha256(HEAD + key)
    digest.update(page)
    return digest.digest()


def _fill(descriptor: int, pieces: list[memoryview]) -> bool:
    """Reads a file from its start; returns whether it fills the buffer."""
    offset = 0
    for piece in pieces:
        rest = piece
        while rest:
            count = os.preadv(descriptor, [rest], offset)
            if count == 0:
                return False
            rest, offset = rest[count:], offset + count
    return True
