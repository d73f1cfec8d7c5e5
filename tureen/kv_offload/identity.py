"""Computes the digest of all that the bytes of a KV page depend on but its tokens: the model's files, the settings, the
code and the processor that compute. Whatever differs, pages of before are not found."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import tureen
from tureen.errors import StartupError
from tureen.files import open_regular, read_regular, replacing
from tureen.log import get_logger

KEPT_SUFFIXES: Final = (".gguf", ".json", ".model", ".safetensors", ".so")
"""Endings of the names of files that decide what is computed."""
COMPUTING: Final = ("attention", "kernels", "layers", "lora", "models", "runner", "vision", "weights")
"""Packages whose code decides what is computed."""
MAX_DIGESTS: Final = 1024

log = get_logger("kv-disk")


class FileDigests:
    """SHA-256 of files. Those of before are kept in a file, by what changes when a file is written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        with suppress(OSError, msgspec.MsgspecError, ValueError):
            self._known = msgspec.json.decode(read_regular(path), type=dict[str, str])

    def of(self, paths: Iterable[Path]) -> list[tuple[str, str]]:
        """Returns name and digest of those files whose content matters. Raises OSError."""
        return [(path.name, self._of(path)) for path in paths if path.suffix in KEPT_SUFFIXES]

    def save(self) -> None:
        """Writes the digests down; a fault costs the next start some time."""
        kept = dict(list(self._known.items())[-MAX_DIGESTS:])
        with suppress(OSError), replacing(self._path) as file:
            file.write(msgspec.json.encode(kept))

    def _of(self, path: Path) -> str:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            place = ":".join(map(str, facts))
            if place not in self._known:
                self._known[place] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._known[place]


class Identity:
    """The digest for the weights that are in memory: of the files as they were read, not as they lie there later."""

    def __init__(self, ask: Callable[[], Mapping[str, Any]], tokens: Iterable[bytes], digests: FileDigests) -> None:
        """`ask` returns the runner's `kv_facts`; `tokens`: the bytes of each token. Raises StartupError."""
        self._ask = ask
        self._digests = digests
        try:
            code = (_code(), digests.of(map(Path, ask()["libraries"])))
        except OSError as error:
            raise StartupError(f"--kv-disk: cannot read {error.filename}: {error.strerror}", field="kv_disk") from None
        vocabulary = hashlib.sha256()
        for token in tokens:
            vocabulary.update(len(token).to_bytes(4, "little") + token)
        machine = (platform.machine(), platform.libc_ver(), np.__version__)
        self._process = (code, vocabulary.hexdigest(), machine)
        self._load: object = None  # the load that `_value` belongs to
        self._value = b""

    def now(self) -> bytes:
        """Returns the digest. It is worked out once for each load of weights."""
        facts = self._ask()
        if facts["load"] != self._load:
            self._load, self._value = facts["load"], self._of(facts)
        return self._value

    def _of(self, facts: Mapping[str, Any]) -> bytes:
        """Returns a unique digest, for files whose content is not known."""
        contents = None
        if facts["files"] is not None:
            with suppress(OSError):
                contents = self._digests.of(map(Path, facts["files"]))
        if contents is None or self._ask() != facts:  # asked again: they may have changed while they were read
            log.warning(
                "the model's files cannot be read, or have changed since the weights were: no other server will find "
                "the KV pages that are saved from now on"
            )
            return os.urandom(32)
        self._digests.save()
        text = msgspec.json.encode((facts["facts"], contents, self._process), order="sorted")
        return hashlib.sha256(text).digest()


def folder_digest(folder: Path) -> bytes:
    """Returns the digest of an adapter's files. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in KEPT_SUFFIXES:
            with open_regular(path) as file:
                digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _code() -> str:
    """Returns the digest of the code that computes. Raises OSError."""
    root = Path(tureen.__file__).parent
    digest = hashlib.sha256(tureen.__version__.encode())
    for package in COMPUTING:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
