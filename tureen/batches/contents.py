"""The bytes of stored files, in a folder of their own, one file each; readable by their owner only."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Container
from pathlib import Path

from tureen.errors import StartupError, echo
from tureen.files import NotRegular, open_regular

MAKE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
OWN_NAME = re.compile(r"file-[0-9a-f]{32}(-output|-errors)?")
EXTEND = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Contents:
    """A folder whose files are called by their ids, which this server made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, file_id: str) -> io.FileIO:
        """Makes a new file and opens it for writing. Raises OSError."""
        return io.FileIO(os.open(self._folder / file_id, MAKE, 0o600), "w")

    def extend(self, file_id: str) -> io.FileIO:
        """Opens a file for reading, and for writing at its end; makes it where there is none. Raises OSError."""
        file = io.FileIO(os.open(self._folder / file_id, EXTEND, 0o600), "a+")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise NotRegular(f"{file_id} is not a regular file")
        return file

    def read(self, file_id: str) -> io.BufferedReader:
        """Opens a file for reading. Raises OSError."""
        return open_regular(self._folder / file_id, no_link=True)

    def remove(self, file_id: str) -> None:
        """Removes a file, if it is there. Raises OSError."""
        (self._folder / file_id).unlink(missing_ok=True)

    def sync(self) -> None:
        """Waits until names that were made are on the disk. Raises OSError."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def prune(self, known: Container[str]) -> None:
        """Removes the files that are not known: of uploads that did not come to their end. What is not called as this
        server calls files stays. Raises OSError."""
        for entry in os.scandir(self._folder):
            if OWN_NAME.fullmatch(entry.name) and entry.name not in known:
                os.unlink(entry.path)


def make_folder(path: str, flag: str) -> Path:
    """Makes a folder for its owner only, where there is none, and in it the folder of contents.

    Raises StartupError naming `flag`.
    """
    try:
        folder = Path(path).expanduser()
        contents = folder / "files"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        contents.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode
    except FileExistsError:
        raise StartupError(f"{flag} {path}: it is not a folder; name one") from None
    except OSError as error:
        raise StartupError(f"{flag} {path}: cannot make it: {error.strerror}") from None
    except ValueError:
        raise StartupError(f"{flag} {echo(path)}: this is not a valid folder name") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise StartupError(f"{flag} {path}: every user of this machine may read or change it; run chmod 700 on it")
    return folder
