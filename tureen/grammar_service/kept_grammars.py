"""Grammars that took long to compile, kept on disk for the next start.

A file is named by a digest of all that its content depends on, and begins with one of its content: a file that is
damaged is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

import tureen.grammar
from tureen.files import open_regular, replacing
from tureen.grammar import Vocabulary
from tureen.grammar_service.messages import CompileReply
from tureen.kernels.cpu import native
from tureen.log import get_logger

SUFFIX = ".grammar"
MAX_BYTES = 64 << 20
"""The most that all files take; those read or written longest ago go first."""
MAX_FILE_BYTES = 16 << 20
DIGEST_BYTES = hashlib.sha256().digest_size

log = get_logger("grammar")


class KeptGrammars:
    """The files of a folder: none until `list_files`, or where the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._origin = b""
        self._names: set[str] = set()

    def list_files(self, vocabulary: Vocabulary) -> None:
        """Reads the names of the files that are there, for this vocabulary."""
        self._origin = _origin(vocabulary)
        with contextlib.suppress(OSError):  # there is no folder yet
            self._names = {path.stem for path in self._folder.iterdir() if path.suffix == SUFFIX}

    def has(self, spec: bytes) -> bool:
        """Returns whether `read` is worth a try for a GrammarSpec, encoded. Looks at no file."""
        return bool(self._names) and self._name(spec) in self._names

    def read(self, spec: bytes) -> CompileReply | None:
        """Returns what was compiled; None where nothing is kept, or it is damaged."""
        path = self._path(spec)
        try:
            with open_regular(path, no_link=True) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    raise OSError("it is not a file that only this user may write")
                data = file.read(MAX_FILE_BYTES)
            os.utime(path)
            content = data[DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != data[:DIGEST_BYTES]:
                raise OSError("it is damaged")
            return msgspec.msgpack.decode(content, type=CompileReply)
        except (OSError, msgspec.DecodeError) as error:
            self._names.discard(path.stem)
            log.warning("not using the kept grammar %s: %s; compiling it again", path, error)
            return None

    def write(self, spec: bytes, reply: CompileReply) -> None:
        """Keeps what was compiled; a fault is a warning."""
        content = msgspec.msgpack.encode(reply)
        if not self._origin or len(content) + DIGEST_BYTES > MAX_FILE_BYTES:
            return
        path = self._path(spec)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(hashlib.sha256(content).digest() + content)
            self._names.add(path.stem)
            self._remove_oldest()
        except OSError as error:
            log.warning("cannot keep a grammar in %s: %s; --no-grammar-cache does not try", self._folder, error)

    def clear(self) -> None:
        """Removes all."""
        self._names.clear()
        with contextlib.suppress(OSError):  # somebody else removes them too
            for path in self._folder.glob(f"*{SUFFIX}"):
                path.unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another server has removed it
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= MAX_BYTES:
                return
            path.unlink(missing_ok=True)
            self._names.discard(path.stem)
            total -= size

    def _name(self, spec: bytes) -> str:
        return hashlib.sha256(self._origin + spec).hexdigest()

    def _path(self, spec: bytes) -> Path:
        return self._folder / (self._name(spec) + SUFFIX)


def _origin(vocabulary: Vocabulary) -> bytes:
    """Returns a digest of what a grammar depends on beside its constraint: the code that compiles it, the
    vocabulary."""
    digest = hashlib.sha256(tureen.__version__.encode())
    for path in sorted(Path(str(tureen.grammar.__file__)).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(Path(str(native.require().__file__)).read_bytes())  # they write and read what is kept
    digest.update(msgspec.msgpack.encode(vocabulary))
    return digest.digest()
