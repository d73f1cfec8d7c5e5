"""Stores the parts of an answer compactly: each part as its difference from the previous part of the same output."""

from __future__ import annotations

import bisect
import re
from itertools import islice

import msgspec

GROUP = 256
"""Maximum number of parts in a group. The parts of a group are read from its first one on, and dropped together."""

BLOCK = 16  # bytes that must be equal for two parts to match again after a difference
WINDOW = 16 << 10  # bytes after a difference that are searched for a match
MAX_TRIES = 8  # places in the old part at which a match is searched
MAX_PIECES = 64  # pieces of a part after which no match is searched
OVERHEAD = 64  # about the bytes that Python needs for each stored part

DELIMITER = re.compile(rb'[,"\n\]}]')
INDEX = b'"index":'
INDEX_WITHIN = 64  # bytes from the end of a part

_coder = msgspec.msgpack

Piece = tuple[int, int] | bytes
"""A slice (start, end) of the previous part, or new bytes."""


class Group(msgspec.Struct):
    """Consecutive parts. The first one can be read alone."""

    start: int  # number of its first part
    parts: list[bytes] = []  # each is msgpack of (its output, its pieces)
    num_bytes: int = 0


class PartLog:
    """Parts number `start` to `end` - 1, in about `max_bytes` at most. Drops the oldest parts, but never the newest.

    Some APIs send the whole text so far in each event of a stream. A difference has only the new bytes, so the log
    grows with the length of the text and not with its square.
    """

    def __init__(self, max_bytes: int) -> None:
        self.end = 0
        self._max_bytes = max_bytes
        self._groups = [Group(0)]
        self._packed_bytes = 0
        self._recent: dict[bytes, bytes] = {}  # the last part of each output in the newest group
        self._recent_bytes = 0

    @property
    def start(self) -> int:
        """Number of the oldest stored part."""
        return self._groups[0].start

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of memory that the log takes."""
        return self._packed_bytes + self._recent_bytes

    def append(self, part: bytes) -> None:
        """Adds a part, and drops the oldest parts if the log is full."""
        group = self._groups[-1]
        if len(group.parts) == GROUP or group.num_bytes > self._max_bytes // 4:
            group = Group(self.end)
            self._groups.append(group)
            self._forget_recent()
        output = _output(part)
        previous = self._recent.get(output, b"")
        packed = _coder.encode((output, difference(part, previous)))
        self._recent[output] = part
        self._recent_bytes += len(part) - len(previous)
        group.parts.append(packed)
        group.num_bytes += len(packed) + OVERHEAD
        self._packed_bytes += len(packed) + OVERHEAD
        self.end += 1
        self._drop()

    def limit(self, max_bytes: int) -> None:
        """Sets the maximum number of bytes."""
        self._max_bytes = max_bytes
        self._drop()

    def close(self) -> None:
        """Frees what only `append` needs. Called after the last part."""
        self._forget_recent()

    def group(self, number: int) -> Group:
        """Returns the group of part `number`, which was not dropped; for a future part the newest group."""
        return self._groups[bisect.bisect_right(self._groups, number, key=lambda group: group.start) - 1]

    def _drop(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._groups) > 1:
            self._packed_bytes -= self._groups.pop(0).num_bytes

    def _forget_recent(self) -> None:
        self._recent.clear()
        self._recent_bytes = 0


class Reader:
    """Reads a log from part `number` on, while it grows."""

    def __init__(self, track: PartLog, number: int) -> None:
        self._track = track
        self._next = number
        self._recent: dict[bytes, bytes] = {}
        if not self.is_late:
            self._next = track.group(number).start
        while self._next < number:
            self.next()

    @property
    def is_at_end(self) -> bool:
        """Whether all existing parts were read."""
        return self._next == self._track.end

    @property
    def is_late(self) -> bool:
        """Whether the next part was dropped before it was read."""
        return self._next < self._track.start

    def next(self) -> bytes:
        """Returns the next part; there must be one."""
        group = self._track.group(self._next)
        if self._next == group.start:
            self._recent.clear()
        output, pieces = _coder.decode(group.parts[self._next - group.start], type=tuple[bytes, list[Piece]])
        previous = self._recent.get(output, b"")
        part = b"".join(piece if isinstance(piece, bytes) else previous[piece[0] : piece[1]] for piece in pieces)
        self._recent[output] = part
        self._next += 1
        return part


def _output(part: bytes) -> bytes:
    """Returns the bytes that identify the output of a server-sent event: from its field `index` on, if that is its last
    field; else b""."""
    at = part.rfind(INDEX, max(0, len(part) - INDEX_WITHIN))
    return part[at + len(INDEX) :] if at >= 0 else b""


def difference(new: bytes, old: bytes) -> list[Piece]:
    """Returns `new` as slices of `old`, in order, and bytes that are not in it."""
    pieces: list[Piece] = []
    done = follows = 0  # new[done:] is not written yet; old[follows:] is where it may match
    while done < len(new):
        length = num_common(new, done, old, follows)
        if length:
            pieces.append((follows, follows + length))
            done, follows = done + length, follows + length
        start, (done, follows) = done, _resume(new, done, old, follows, may_look=len(pieces) < MAX_PIECES)
        if done > start:
            pieces.append(new[start:done])
    return pieces


def _resume(new: bytes, done: int, old: bytes, follows: int, *, may_look: bool) -> tuple[int, int]:
    """Returns the positions after new[done] and old[follows], which differ, from which the two are equal again; their
    ends if no such place is found."""
    if may_look:
        for delimiter in islice(DELIMITER.finditer(old, follows, follows + WINDOW), MAX_TRIES):
            at = new.find(old[delimiter.start() : delimiter.start() + BLOCK], done, done + WINDOW)
            if at >= 0:
                return at, delimiter.start()
    return len(new), len(old)


def num_common(left: bytes, at: int, right: bytes, there: int) -> int:
    """Returns the length of the common beginning of left[at:] and right[there:]."""
    length, step = 0, BLOCK
    while (piece := left[at + length : at + length + step]) == right[there + length : there + length + step]:
        length += len(piece)
        if len(piece) < step:
            return length
        step *= 2
    while step > 1:  # the next `step` bytes are not all equal
        step //= 2
        if left[at + length : at + length + step] == right[there + length : there + length + step]:
            length += step
    return length
