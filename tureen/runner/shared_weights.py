"""Packed weights that several engine processes of the same files share: one packs them, all map them. No torch.

They lie in a file without a name, which the server makes and its engines inherit: the length of the header (8 bytes,
little-endian; 0 until all is there), the header (JSON), and from the next multiple of ALIGNMENT on the weights' bytes,
each from a multiple of it.

Locks on two bytes of the file say who looks or writes, and who has it mapped. The system ends them with the process.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.log import get_logger
from tureen.runner.packed_copy import Planned, bytes_of, offsets_of

TURN: Final = 0  # the byte locked by who looks, writes or frees
USE: Final = 1  # the byte locked by all who have the file mapped
FIXED: Final = 8

log = get_logger("runner")


class _Contents(msgspec.Struct, frozen=True):
    origin: str
    weights: list[Planned]
    offsets: list[int]


class SharedWeights:
    """The weights of one model in memory that processes share."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the file, inherited; None makes one."""
        self.descriptor = _nameless() if descriptor is None else descriptor
        self._mapping: weakref.ref[NDArray[np.uint8]] | None = None
        self._lock = threading.Lock()

    def has(self, origin: str) -> bool:
        """Says whether the weights of this origin are there, which then stay until this process takes or frees them.
        See packed_copy.origin_of."""
        with self._turn():
            header = self._header()
            is_there = header is not None and header.origin == origin
            if is_there:
                fcntl.lockf(self.descriptor, fcntl.LOCK_SH, 1, USE)
        return is_there

    def take(self, origin: str, kernels: ModuleType, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the weights of this origin by name: those that are there; else what `make` returns, moved there.

        Where weights of another origin are in use, the caller gets its own.
        """
        with self._turn():
            header = self._header()
            if header is not None and header.origin == origin:
                log.info("the weights are there already: another engine of the same files has packed them")
                return self._mapped(header, kernels)
            if self._is_mapped or not self._try(USE):
                return make()
            try:
                return self._mapped(self._write(origin, make()), kernels)
            except OSError as error:
                log.warning("the weights are not shared with other engines: %s", error.strerror or error)
                os.truncate(self.descriptor, 0)
                return make()

    def free(self) -> None:
        """Gives the memory back, where no process has it mapped or is about to."""
        with self._lock:
            if self._is_mapped:
                return
            self._unlock(USE)
            if not self._try(TURN):
                return
            if self._try(USE):
                os.truncate(self.descriptor, 0)
                self._unlock(USE)
            self._unlock(TURN)

    @property
    def _is_mapped(self) -> bool:
        """Whether this process has the file mapped; its own locks do not keep it out."""
        return self._mapping is not None and self._mapping() is not None

    def _header(self) -> _Contents | None:
        length = int.from_bytes(os.pread(self.descriptor, FIXED, 0), "little")
        return msgspec.json.decode(os.pread(self.descriptor, length, FIXED), type=_Contents) if length else None

    def _write(self, origin: str, weights: dict[str, Any]) -> _Contents:
        """Moves weights to the file, one after the other: their memory goes as the file's grows. Raises OSError."""
        os.truncate(self.descriptor, 0)  # what a killed process left
        planned = [_planned(name, weight) for name, weight in weights.items()]
        data = [bytes_of(weight) for weight in weights.values()]
        room = FIXED + sum(len(name) + 256 for name in weights)  # more than the header takes
        *offsets, end = offsets_of(room, data)
        del data
        os.truncate(self.descriptor, end)
        for plan, offset in zip(planned, offsets, strict=True):
            _write_all(self.descriptor, bytes_of(weights.pop(plan.name)), offset)
        header = _Contents(origin, planned, offsets)
        text = msgspec.json.encode(header)
        assert FIXED + len(text) <= room
        os.pwrite(self.descriptor, text, FIXED)
        os.pwrite(self.descriptor, len(text).to_bytes(FIXED, "little"), 0)
        return header

    def _mapped(self, header: _Contents, kernels: ModuleType) -> dict[str, Any]:
        """Returns the weights where they lie, read-only. The mapping lives as long as any of them."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_SH, 1, USE)
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None:
            mapping = kernels.map_file(self.descriptor, os.fstat(self.descriptor).st_size)
            self._mapping = weakref.ref(mapping)
        weights = {}
        for plan, offset in zip(header.weights, header.offsets, strict=True):
            num_bytes = kernels.packed_bytes(plan.format, *plan.shape) if plan.format else 4 * math.prod(plan.shape)
            data = mapping[offset : offset + num_bytes]
            weights[plan.name] = (
                kernels.Matrix.over(data, plan.format, *plan.shape)
                if plan.format
                else data.view(np.float32).reshape(plan.shape)
            )
        return weights

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, TURN)
            try:
                yield
            finally:
                self._unlock(TURN)

    def _try(self, place: int) -> bool:
        """Locks a byte for this process alone, where no other process has it."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return False
        return True

    def _unlock(self, place: int) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, place)


def _planned(name: str, weight: Any) -> Planned:
    if isinstance(weight, np.ndarray):
        return Planned(name, weight.shape, "")
    return Planned(name, (weight.rows, weight.cols), weight.format)


def _nameless() -> int:
    """Returns the descriptor of a new file that has no name: in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tureen-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_all(descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
    rest = data.data
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count
