"""Keeps packed weights on disk, so that the next start reads them instead of fitting scales again. No torch.

A file: MAGIC, the length of the header (8 bytes, little-endian), its CRC-32 (4 bytes), the header (JSON), and from the
next multiple of ALIGNMENT on the weights' bytes, each from a multiple of it. Any fault in a file is a warning: the
weights are packed again and the file is replaced.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.config import Config, cache_dir
from tureen.files import PART, open_regular, replacing
from tureen.log import Progress, get_logger
from tureen.weights.source import ModelSource

MAGIC: Final = b"tureen packed 1\n"  # to be raised when this file's form, or what Python makes of a model, changes
ALIGNMENT: Final = 64
MAX_HEADER: Final = 1 << 26
SUFFIX: Final = ".packed"
KEPT: Final = 4  # files; the one read or written longest ago goes first
STALE_SECONDS: Final = 3600
LEAST_BYTES: Final = 192 << 20  # of weights: fewer are packed again in the time that a person does not notice

log = get_logger("runner")


class Planned(NamedTuple):
    """A weight as it will be in memory; `format`: that of a native matrix, or "" for an array of float32."""

    name: str
    shape: tuple[int, ...]
    format: str


class _CopyHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    origin: str
    weights: list[Planned]
    checksums: list[int]


class _Unusable(Exception):
    """The reason why a file is not read."""


class PackedCopy:
    """The file of one model with one set of settings. `weights`: all of them, in the order of the file."""

    def __init__(self, source: ModelSource, config: Config, kernels: ModuleType, weights: Sequence[Planned]) -> None:
        settings = (config.dtype, config.quantization or "")
        place = hashlib.sha256(repr((str(source.path.resolve()), settings)).encode()).hexdigest()[:16]
        self.path = cache_dir(config) / "packed" / f"{source.name}-{place}{SUFFIX}"
        self._origin = origin_of(source, settings, kernels)
        self._weights = list(weights)
        self._kernels = kernels

    def read(self, num_threads: int, progress: Progress) -> dict[str, Any] | None:
        """Returns the weights by name, or None when there is no file or it cannot be used."""
        try:
            with _open_own(self.path) as file:
                weights = self._read(file, num_threads, progress)
            os.utime(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_Unusable, OSError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) else fault
            log.warning("not using the packed copy %s: %s; packing the weights again", self.path, reason)
            return None
        return weights

    def write(self, weights: Mapping[str, Any]) -> None:
        """Writes the weights for the next start; a fault is a warning."""
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_leftovers(folder)
            self._write(folder, [bytes_of(weights[weight.name]) for weight in self._weights])
            _remove_oldest(folder)
        except OSError as error:
            reason = error.strerror or error
            log.warning("cannot keep packed weights in %s: %s; --no-packed-cache does not try", folder, reason)

    def _read(self, file: BinaryIO, num_threads: int, progress: Progress) -> dict[str, Any]:
        header, start = _read_header(file)
        if header.origin != self._origin or header.weights != self._weights:
            raise _Unusable("it was made from other files, or by another version")
        blanks = [self._blank(weight_plan) for weight_plan in self._weights]
        targets = [bytes_of(weight) for weight in blanks]
        *offsets, end = offsets_of(start, targets)
        if os.fstat(file.fileno()).st_size != end or len(header.checksums) != len(blanks):
            raise _Unusable("it is cut short or too long")

        def fill(target: NDArray[np.uint8], offset: int, checksum: int) -> bool:
            _read_into(file.fileno(), target, offset)
            return _checksum(target) == checksum

        with ThreadPoolExecutor(num_threads) as threads:
            for done, is_whole in enumerate(threads.map(fill, targets, offsets, header.checksums), 1):
                if not is_whole:
                    raise _Unusable("its bytes changed after they were written")
                progress("load weights (packed copy)", done, len(blanks))
        return {weight_plan.name: weight for weight_plan, weight in zip(self._weights, blanks, strict=True)}

    def _blank(self, planned: Planned) -> Any:
        if planned.format:
            return self._kernels.Matrix.blank(planned.format, *planned.shape)
        return np.empty(planned.shape, np.float32)

    def _write(self, folder: Path, data: Sequence[NDArray[np.uint8]]) -> None:
        header = _CopyHeader(self._origin, self._weights, [_checksum(array) for array in data])
        text = msgspec.json.encode(header)
        head = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text
        *offsets, end = offsets_of(len(head), data)
        if end > shutil.disk_usage(folder).free:
            raise OSError(f"{end >> 20} MiB are needed, more than the disk has free")
        with replacing(self.path) as file:
            file.write(head)
            for array, offset in zip(data, offsets, strict=True):
                file.seek(offset)
                file.write(array.data)
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())


def origin_of(source: ModelSource, settings: tuple[str, ...], kernels: ModuleType) -> str:
    """Names everything that the packed bytes depend on. They are the same with every instruction set."""
    files = source.files
    facts = [(str(file.resolve()), *_facts(file)) for file in sorted(files)]
    return hashlib.sha256(repr((facts, settings, _facts(Path(str(kernels.__file__))))).encode()).hexdigest()


def _facts(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _open_own(path: Path) -> io.BufferedReader:
    """Opens a plain file that no other user can have written. Raises _Unusable, OSError."""
    file = open_regular(path, no_link=True)
    try:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise _Unusable("it is not a file that only this user may write")
    except BaseException:
        file.close()
        raise
    return file


def _read_header(file: BinaryIO) -> tuple[_CopyHeader, int]:
    """Returns the header, and the offset at which it ends."""
    fixed = file.read(len(MAGIC) + 12)
    if len(fixed) < len(MAGIC) + 12 or not fixed.startswith(MAGIC):
        raise _Unusable("it is not of this version")
    length, checksum = int.from_bytes(fixed[-12:-4], "little"), int.from_bytes(fixed[-4:], "little")
    text = file.read(length) if length <= MAX_HEADER else b""
    if len(text) != length or zlib.crc32(text) != checksum:
        raise _Unusable("its header is damaged")
    try:
        return msgspec.json.decode(text, type=_CopyHeader), len(fixed) + length
    except msgspec.MsgspecError:
        raise _Unusable("its header is damaged") from None


def bytes_of(weight: Any) -> NDArray[np.uint8]:
    """Returns the memory of a matrix or an array, not copied."""
    data: NDArray[np.uint8] = weight.reshape(-1).view(np.uint8) if isinstance(weight, np.ndarray) else weight.data
    return data


def offsets_of(start: int, data: Sequence[NDArray[np.uint8]]) -> Iterator[int]:
    """Yields the offset at which each array begins after the `start` bytes of the header, and the end of the file."""
    for array in data:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        yield start
        start += array.nbytes
    yield start


def _read_into(descriptor: int, target: NDArray[np.uint8], offset: int) -> None:
    rest = target.data
    while rest:
        count = os.preadv(descriptor, [rest], offset)
        if count == 0:
            raise _Unusable("it is cut short")
        rest, offset = rest[count:], offset + count


def _checksum(data: NDArray[np.uint8]) -> int:
    """Returns the sum of the array's 64-bit words: as fast as memory, where a CRC takes as long as the reading."""
    whole = data.nbytes // 8 * 8
    words = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(data[whole:].tobytes(), "little")) % (1 << 64)


def _remove_leftovers(folder: Path) -> None:
    """Removes the files that killed processes left behind."""
    for part in folder.glob(f".*{PART}"):
        with suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()


def _remove_oldest(folder: Path) -> None:
    ages = {}
    for file in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another server removes as well
            ages[file] = file.stat().st_mtime_ns
    for file in sorted(ages, key=ages.__getitem__)[:-KEPT]:
        file.unlink(missing_ok=True)
