"""Finds arrays of strings in a GGUF file, each string after its length, a 64-bit integer. Vocabularies have 100,000 of
them."""

from __future__ import annotations

import mmap
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

LENGTH: Final = Struct("<Q")
FEW: Final = 64
GUESS: Final = 24  # bytes that a string takes with its length, in the mean


class StringFault(Exception):
    """A fault in an array of strings."""


class Strings(NamedTuple):
    """An array of strings in the file: where the length of its first string is, and where its last string ends."""

    data: mmap.mmap
    at: int
    end: int
    length: int

    def decode(self) -> list[str]:
        """Returns the strings. Raises StringFault for one that is not UTF-8."""
        short = _Short.find(self.data, self.at, self.length)
        return (short and short.decode()) or self._decode_each()

    def _decode_each(self) -> list[str]:
        data, at, read_len = self.data, self.at, LENGTH.unpack_from
        strings: list[str] = []
        try:
            for _ in range(self.length):
                start = at + 8
                at = start + read_len(data, at)[0]
                strings.append(data[start:at].decode())
        except UnicodeDecodeError:
            raise StringFault(f"the string at byte {start} is not UTF-8") from None
        return strings


def locate(data: mmap.mmap, at: int, length: int) -> Strings:
    """Finds the array of `length` strings that begins at byte `at`. Raises StringFault when it is not in the file."""
    short = _Short.find(data, at, length)
    return Strings(data, at, _end(data, at, length) if short is None else at + short.end, length)


def _end(data: mmap.mmap, at: int, length: int) -> int:
    size, read_len = len(data), LENGTH.unpack_from
    for _ in range(length):
        start = at + 8
        at = start + read_len(data, at)[0] if start <= size else size + 1
        if at > size:
            raise StringFault(f"truncated or corrupt: a string at byte {start} ends beyond the file")
    return at


class _Short(NamedTuple):
    """Strings of 1 to 255 bytes: then the lengths are what seven zero bytes follow, and all are found at once."""

    data: NDArray[np.uint8]  # from the first length on
    places: NDArray[np.int64]  # of the lengths' first bytes
    end: int

    @classmethod
    def find(cls, data: mmap.mmap, at: int, length: int) -> _Short | None:
        """Finds short strings; returns None where there may be others among them, or so few that they are not worth
        it."""
        if length < FEW:
            return None
        places = np.empty(0, np.int64)
        num_bytes, rest = 0, len(data) - at
        while len(places) < length and num_bytes < min(rest, 256 * length):
            num_bytes = min(max(GUESS * length, 2 * num_bytes), rest)
            window = np.frombuffer(data, np.uint8, num_bytes, at)
            zeros = window == 0
            for step in (1, 2, 3):  # runs of two, of four, of seven
                zeros = zeros[:-step] & zeros[step:]
            places = np.flatnonzero(zeros)[:length] - 1
        if len(places) < length or places[0] != 0:
            return None
        ends = places + 8 + window[places]
        if (places[1:] != ends[:-1]).any() or ends[-1] > num_bytes:
            return None
        return cls(window, places, int(ends[-1]))

    def decode(self) -> list[str] | None:
        """Returns the strings; None where one holds a zero byte, or is not UTF-8."""
        data = self.data[: self.end].copy()
        data[self.places] = 0
        is_text = np.ones(self.end, bool)
        for byte in range(1, 8):
            is_text[self.places + byte] = False
        try:
            strings = data[is_text].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return None
        return strings if len(strings) == len(self.places) else None
