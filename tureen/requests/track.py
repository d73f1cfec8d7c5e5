"""The parts of an answer, kept in little room: of each part, what is new in it."""

from __future__ import annotations

import bisect
import re
from itertools import islice

import msgspec

GROUP = 256
"""At most so many parts can be read only with those before them, and are dropped together."""

BLOCK = 16  # bytes; where so many are equal, two parts run together again
WINDOW = 16 << 10  # bytes, in which that is looked for
MAX_TRIES = 8
MAX_PIECES = 64
OVERHEAD = 64  # bytes of Python's own, about, for each part

DELIMITER = re.compile(rb'[,"\n\]}]')
INDEX = b'"index":'
INDEX_WITHIN = 64  # bytes from the end of a part

_coder = msgspec.msgpack

Piece = tuple[int, int] | bytes
"""A slice of an older part, (start, end), or bytes of its own."""


class Group(msgspec.Struct):
    """Parts of which the first can be read without others."""

    start: int  # number of the first
    parts: list[bytes] = []  # each packed: which output it is of, and its pieces
    num_bytes: int = 0


class Track:
    """Parts number `start` to `end` - 1, in at most about `max_bytes`: the oldest are dropped, never the newest one.

    Events of a stream are long where each has all the text so far, but then each is the one before it of the same
    output with a few bytes more: what is kept grows with the text, not with its square.
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
        return self._groups[0].start

    @property
    def num_bytes(self) -> int:
        return self._packed_bytes + self._recent_bytes

    def append(self, part: bytes) -> None:
        group = self._groups[-1]
        if len(group.parts) == GROUP or group.num_bytes > self._max_bytes // 4:
            group = Group(self.end)
            self._groups.append(group)
            self._forget_recent()
        output = _output(part)
        like = self._recent.get(output, b"")
        packed = _coder.encode((output, difference(part, like)))
        self._recent[output] = part
        self._recent_bytes += len(part) - len(like)
        group.parts.append(packed)
        group.num_bytes += len(packed) + OVERHEAD
        self._packed_bytes += len(packed) + OVERHEAD
        self.end += 1
        self._drop()

    def limit(self, max_bytes: int) -> None:
        """Keep at most so much from now on."""
        self._max_bytes = max_bytes
        self._drop()

    def close(self) -> None:
        """There are no more parts."""
        self._forget_recent()

    def group(self, number: int) -> Group:
        """The one that part `number`, which was not dropped, is in, or will be or the one before."""
        return self._groups[bisect.bisect_right(self._groups, number, key=lambda group: group.start) - 1]

    def _drop(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._groups) > 1:
            self._packed_bytes -= self._groups.pop(0).num_bytes

    def _forget_recent(self) -> None:
        self._recent.clear()
        self._recent_bytes = 0


class Reader:
    """Reads a track from part `number` on, while it grows."""

    def __init__(self, track: Track, number: int) -> None:
        self._track = track
        self._next = number
        self._recent: dict[bytes, bytes] = {}
        if not self.is_late:
            self._next = track.group(number).start
        while self._next < number:
            self.next()

    @property
    def is_at_end(self) -> bool:
        return self._next == self._track.end

    @property
    def is_late(self) -> bool:
        """What comes next was dropped."""
        return self._next < self._track.start

    def next(self) -> bytes:
        group = self._track.group(self._next)
        if self._next == group.start:
            self._recent.clear()
        output, pieces = _coder.decode(group.parts[self._next - group.start], type=tuple[bytes, list[Piece]])
        like = self._recent.get(output, b"")
        part = b"".join(piece if isinstance(piece, bytes) else like[piece[0] : piece[1]] for piece in pieces)
        self._recent[output] = part
        self._next += 1
        return part


def _output(part: bytes) -> bytes:
    """What stands for the output that an event is of, where its index is the event's last field; else b""."""
    at = part.rfind(INDEX, max(0, len(part) - INDEX_WITHIN))
    return part[at + len(INDEX) :] if at >= 0 else b""


def difference(new: bytes, old: bytes) -> list[Piece]:
    """`new` as slices of `old`, in order, and bytes that were not found there."""
    pieces: list[Piece] = []
    done = follows = 0  # new[done:] is still to be told; old[follows:] is what it may continue with
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
    """Where behind new[done] and old[follows], which differ, the two run together again; else their ends."""
    if may_look:
        for found in islice(DELIMITER.finditer(old, follows, follows + WINDOW), MAX_TRIES):
            at = new.find(old[found.start() : found.start() + BLOCK], done, done + WINDOW)
            if at >= 0:
                return at, found.start()
    return len(new), len(old)


def num_common(one: bytes, at: int, other: bytes, there: int) -> int:
    """How many bytes of one[at:] and other[there:] are equal from the start."""
    length, step = 0, BLOCK
    while (piece := one[at + length : at + length + step]) == other[there + length : there + length + step]:
        length += len(piece)
        if len(piece) < step:
            return length
        step *= 2
    while step > 1:  # the next `step` bytes are not all equal
        step //= 2
        if one[at + length : at + length + step] == other[there + length : there + length + step]:
            length += step
    return length
