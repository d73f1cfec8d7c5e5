"""Reads pictures that are files on the server's machine: only below one folder, and only regular files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tureen.errors import StartupError
from tureen.files import open_regular
from tureen.media.references import MAX_BYTES, MAX_NAME_CHARS

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def media_root(setting: str | None, host: str) -> Path | None:
    """Returns the folder below which clients may name files, for the settings `media_path` and `host`; None = they may
    not.

    Without a setting it is the current directory where only this machine reaches the server, unless that is `/`: a
    service that was started nowhere in particular shows nothing. Raises StartupError.
    """
    if setting == "":
        return None
    if setting is None:
        here = Path.cwd()
        return here if is_loopback(host) and here != Path("/") else None
    folder = Path(setting).expanduser().absolute()
    if not folder.is_dir():
        raise StartupError(
            f"--media-path {setting}: there is no such folder; give one with pictures in it, or '' for none"
        )
    return folder


def read_below(root: Path, name: str) -> bytes | None:
    """Reads a regular file of at most MAX_BYTES. `name`: relative to the folder, or absolute, beginning with the
    folder's.

    Returns None when it is not there or may not be read, whatever the reason: a client cannot tell what else there is.
    No symbolic link is followed below the root, so what is found cannot lie elsewhere, even while somebody renames
    things.
    """
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as opened:
        *folders, last = _parts(root, name)
        folder = os.open(root, OPEN_FOLDER & ~os.O_NOFOLLOW)
        for part in folders:
            with _closing(folder):
                folder = os.open(part, OPEN_FOLDER, dir_fd=folder)
        opened.enter_context(_closing(folder))
        file = opened.enter_context(open_regular(last, no_link=True, dir_fd=folder))
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            return None
        data = file.read(MAX_BYTES + 1)
        return data if len(data) <= MAX_BYTES else None
    return None


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _parts(root: Path, name: str) -> tuple[str, ...]:
    """Names of folders below the root, and last of a file. Raises ValueError."""
    if len(name) > MAX_NAME_CHARS:
        raise ValueError("the name is too long")
    path = PurePosixPath(name)
    if path.is_absolute():
        base = root if path.is_relative_to(root) else root.resolve()
        path = path.relative_to(base)
    if ".." in path.parts:
        raise ValueError("the name leaves the folder")
    return path.parts


def is_loopback(host: str) -> bool:
    """Says whether only this machine reaches a server that listens on this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
