"""A file of tensors, mapped into memory: their bytes can be read without a copy and given back to the system."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import StartupError
from tureen.files import open_regular

MAX_SIZE = 1 << 48
"""The largest dimension, number of elements and offset that a file can have."""
MAX_AHEAD_BYTES = 256 << 20
"""Most bytes that are read ahead. More would push what is needed sooner out of the memory of small machines."""

FETCH_AGAIN = "download or convert the file again"


class TensorEncoding(NamedTuple):
    """How a tensor's values are stored: `num_bytes` per block of `block_len` values."""

    name: str
    block_len: int
    num_bytes: int


class TensorInfo(NamedTuple):
    """A tensor in a file. `shape` has the outermost dimension first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: TensorEncoding
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.encoding.num_bytes * self.encoding.block_len


class MappedFile:
    """A file, mapped as long as this object or any view of its bytes lives.

    Raises StartupError naming it when it is empty or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _fetch_ahead(os.dup(file.fileno()), len(self._map))
        except ValueError:
            raise unusable(path, "corrupt: the file is empty") from None
        except FileNotFoundError:
            raise StartupError(f"model {path}: there is no such file; download the model again") from None
        except OSError as error:
            raise StartupError(f"model {path}: cannot read it: {error.strerror}") from None

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Returns the stored bytes of a tensor, read-only, not copied."""
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)

    def release(self, tensor: TensorInfo) -> None:
        """Gives the tensor's pages back to the system, so that they do not count as resident; they can be read
        again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def _fetch_ahead(descriptor: int, num_bytes: int) -> None:
    """Has the system read the file, if it has not got it, while other things are done. Closes the descriptor.

    Nothing is copied. Advice (posix_fadvise) would have to be given piece by piece, each time behind all other threads.
    """

    def fetch() -> None:
        try:
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.sendfile(nowhere.fileno(), descriptor, 0, min(num_bytes, MAX_AHEAD_BYTES))
        finally:
            os.close(descriptor)

    try:
        threading.Thread(target=fetch, name="read-ahead", daemon=True).start()
    except RuntimeError:  # the system starts no more threads
        os.close(descriptor)


def num_elements(shape: Sequence[int]) -> int:
    """Returns the number of elements of a shape, or more than MAX_SIZE once the product exceeds it.

    Dimensions must be bounded before: the product of a million of them would take hours.
    """
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > MAX_SIZE:
            break
    return count


def unusable(path: Path, fault: str, fix: str = FETCH_AGAIN) -> StartupError:
    """Returns the error for a file with this fault."""
    return StartupError(f"model {path}: {fault}; {fix}")
