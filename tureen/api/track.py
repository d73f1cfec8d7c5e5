"""The parts of an answer, kept in little room: of each part, what is new in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

GROUP = 256
"""So many parts can be read without those before them, and are dropped together."""

RECENT = 8
"""A part may be like the last one, or, where several outputs grow side by side, one before it."""

BLOCK = 16  # bytes; where so many are equal, two parts run together again
SKIPS = (0, 1, 2, 4, 8, 16, 32, 64)  # so many bytes that an older part has may not be in the newer one
OVERHEAD = 64  # bytes of Python's own, about, for each part

_coder = msgspec.msgpack

Packed = tuple[int, list[tuple[int, int] | bytes]]
"""The part so many places back that this one is like, 0 = none; slices of that, (start, end), and bytes of its own."""


class Track:
    """Parts number `start` to `end` - 1, of at most about `max_bytes`: the oldest are dropped. The newest group stays.

    Events of a stream are long where each has all the text so far, but then each is one before it with a few bytes
    more: what is kept grows with the text, not with its square.
    """

    def __init__(self, max_bytes: int) -> None:
        self.start = 0
        self.end = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._groups: list[list[bytes]] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT)

    def append(self, part: bytes) -> None:
        if (self.end - self.start) % GROUP == 0:
            self._groups.append([])
            self._recent.clear()
        packed = _coder.encode(self._pack(part))
        self._groups[-1].append(packed)
        self._recent.append(part)
        self.end += 1
        self.num_bytes += len(packed) + OVERHEAD
        while self.num_bytes > self._max_bytes and len(self._groups) > 1:
            self.start += GROUP
            self.num_bytes -= sum(len(one) + OVERHEAD for one in self._groups.pop(0))

    def _pack(self, part: bytes) -> Packed:
        if not self._recent:
            return 0, [part]
        alike = [num_common(part, 0, one, 0) for one in self._recent]
        best = max(range(len(alike)), key=lambda place: (alike[place], place))
        return len(alike) - best, list(difference(part, self._recent[best]))

    def packed(self, number: int) -> bytes:
        group, place = divmod(number - self.start, GROUP)
        return self._groups[group][place]


class Reader:
    """Reads a track from part `number` on, while it grows."""

    def __init__(self, track: Track, number: int) -> None:
        self._track = track
        self._next = number - (number - track.start) % GROUP
        self._recent: deque[bytes] = deque(maxlen=RECENT)
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
        back, pieces = _coder.decode(self._track.packed(self._next), type=Packed)
        like = self._recent[-back] if back else b""
        part = b"".join(piece if isinstance(piece, bytes) else like[piece[0] : piece[1]] for piece in pieces)
        self._next += 1
        if (self._next - self._track.start) % GROUP == 0:
            self._recent.clear()
        else:
            self._recent.append(part)
        return part


def difference(new: bytes, old: bytes) -> Iterator[tuple[int, int] | bytes]:
    """`new` as slices of `old`, (start, end), in order, and bytes that are not there."""
    done = follows = 0  # new[done:] is still to be told; old[follows:] is what it may continue with
    while done < len(new):
        length = num_common(new, done, old, follows)
        if length:
            yield follows, follows + length
            done, follows = done + length, follows + length
        start, done = done, len(new)
        for skip in SKIPS:
            block = old[follows + skip : follows + skip + BLOCK]
            found = new.find(block, start) if block else -1
            if found >= 0:
                done, follows = found, follows + skip
                break
        if done > start:
            yield new[start:done]


def num_common(one: bytes, at: int, other: bytes, there: int) -> int:
    """How many bytes of one[at:] and other[there:] are equal from the start."""
    least, most = 0, min(len(one) - at, len(other) - there)
    if one[at : at + most] == other[there : there + most]:
        return most
    while most - least > 1:  # the first `least` are equal, the first `most` are not
        middle = (least + most) // 2
        if one[at + least : at + middle] == other[there + least : there + middle]:
            least = middle
        else:
            most = middle
    return least
