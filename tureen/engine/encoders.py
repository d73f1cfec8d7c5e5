"""The pictures of waiting requests: encoded a piece at a time, between steps, each picture once."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from tureen.contract.runner import RowError
from tureen.contract.types import GenerateRequest, MediaItem
from tureen.engine.queue import Rank
from tureen.engine.sequence import Sequence
from tureen.errors import RequestFailed, Unavailable
from tureen.log import get_logger

SHARE = 0.8
"""Seconds of encoding for each second of steps while both have work: the time between tokens stays under twice."""

KEPT_BYTES = 256 << 20
"""Bytes of embeddings that may be asked for again; and of those that wait for a place in a step."""

MAX_PIXEL_BYTES = 1 << 30
"""Bytes of pixels of all requests that have not ended; each picture counts once, for they share its pixels."""

MAX_ENCODE_S = 600.0
FAILED = RowError("request_failed", "its picture could not be encoded")

log = get_logger("engine")

Key = tuple[str, str]
"""The salt that separates the caches of clients, and the picture's digest."""


class PictureEncoder(Protocol):
    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """See Runner.encode."""


class Current(NamedTuple):
    """The picture that is being encoded."""

    key: Key
    sequence: Sequence
    pieces: Iterator[bytes | None]


class EncodedSequence(NamedTuple):
    """A sequence that waits no longer: it has all its embeddings, or here is why it never will."""

    sequence: Sequence
    error: RowError | None = None


class Encoders:
    """Sequences whose pictures are not all encoded, and what came of earlier pictures.

    One picture is encoded after the other; which is next, `rank` says, the queue's own order.
    """

    def __init__(self, runner: PictureEncoder, rank: Rank, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_pictures = 0  # in prompts, as far as there are embeddings for them
        self.num_encoded = 0
        self._runner = runner
        self._rank = rank
        self._clock = clock
        self.waiting: dict[Sequence, None] = {}  # read from outside, changed here only
        self._kept: OrderedDict[Key, bytes] = OrderedDict()  # the longest unused first
        self._kept_bytes = 0
        self._current: Current | None = None
        self._current_s = 0.0  # spent on it
        self._credit_s = 0.0
        self._step_began_s = 0.0

    def add(self, sequence: Sequence) -> bool:
        """Whether it has all its embeddings already; else it waits for them."""
        is_ready = self._complete(sequence)
        if not is_ready:
            self.waiting[sequence] = None
        return is_ready

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        del self.waiting[sequence]
        if self._current is not None and self._current.sequence is sequence:
            successor = next((waiting for waiting in self.waiting if self._current.key in _keys(waiting)), None)
            self._current = None if successor is None else self._current._replace(sequence=successor)

    def clear(self) -> None:
        """Forget what came of earlier pictures."""
        self._kept.clear()
        self._kept_bytes = 0

    def begin_step(self) -> None:
        if self.waiting:
            self._step_began_s = self._clock()

    def advance(self, queued: Iterable[Sequence], *, after_step: bool) -> list[EncodedSequence]:
        """Encode for as long as the step that has just ended allows; one piece where there was none.

        Nothing while those that are `queued` hold much already. Returns who waits no longer.
        """
        if not self.waiting:
            return []
        step_s = self._clock() - self._step_began_s
        self._credit_s = min(self._credit_s, 0.0) + SHARE * step_s if after_step else 0.0
        if after_step and _encoded_bytes(queued) > KEPT_BYTES:
            return []
        ready: list[EncodedSequence] = []
        while self.waiting and (self._credit_s > 0 or not after_step):
            started_s = self._clock()
            ready += self._advance()
            spent_s = self._clock() - started_s
            self._current_s += spent_s
            if not after_step:
                break
            self._credit_s -= spent_s
        return ready

    def _advance(self) -> list[EncodedSequence]:
        """One piece of work."""
        current = self._current = self._current or self._begin()
        try:
            embeddings = self._take_piece(current)
        except Exception:  # the request fails, the others go on
            log.exception("a picture of request %s could not be encoded", current.sequence.request.id)
            self._current = None
            del self.waiting[current.sequence]
            return [EncodedSequence(current.sequence, FAILED)]
        if embeddings is None:
            return []
        self._current = None
        self.num_encoded += 1
        self._keep(current.key, embeddings)
        ready = [sequence for sequence in self.waiting if self._complete(sequence)]
        for sequence in ready:
            del self.waiting[sequence]
        return [EncodedSequence(sequence) for sequence in ready]

    def _begin(self) -> Current:
        sequence = min(self.waiting, key=self._rank)
        assert sequence.embedded is not None
        item = sequence.embedded.media[len(sequence.embedded.encoded)]
        self._current_s = 0.0
        return Current((sequence.request.cache_salt, item.digest), sequence, self._pieces(item))

    def _pieces(self, item: MediaItem) -> Iterator[bytes | None]:
        """Encodes a picture piece by piece; an error that `encode` raises at once comes with the first piece."""
        yield from self._runner.encode(item)

    def _take_piece(self, current: Current) -> bytes | None:
        """Raises RequestFailed for what takes for ever, and for what are no numbers."""
        embeddings = next(current.pieces)
        if embeddings is None and self._current_s > MAX_ENCODE_S:
            raise RequestFailed(f"a picture is not encoded after {MAX_ENCODE_S:.0f} s")
        if embeddings is not None and not np.isfinite(np.frombuffer(embeddings, np.float32)).all():
            raise RequestFailed("a picture's embeddings are not finite")
        return embeddings

    def _complete(self, sequence: Sequence) -> bool:
        """Give it what is there of the embeddings it lacks. Whether it has all then; its pixels go."""
        embedded = sequence.embedded
        assert embedded is not None
        for key in _keys(sequence)[len(embedded.encoded) :]:
            kept = self._kept.get(key)
            if kept is None:
                return False
            self._kept.move_to_end(key)
            embedded.encoded.append(kept)
            self.num_pictures += 1
        embedded.media = tuple(msgspec.structs.replace(item, pixels=b"") for item in embedded.media)
        sequence.request = msgspec.structs.replace(sequence.request, media=embedded.media)
        return True

    def _keep(self, key: Key, embeddings: bytes) -> None:
        self._kept[key] = embeddings
        self._kept_bytes += len(embeddings)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)


def share_pixels(request: GenerateRequest, others: Iterable[Sequence]) -> GenerateRequest:
    """The request, with the pixels that others have where they show the same pictures.

    Raises Unavailable when the pictures of all requests together would take too much memory.
    """
    if not request.media:
        return request
    sizes: dict[str, int] = {}
    pixels: dict[str, bytes] = {}
    for item in (*(item for other in others for item in other.request.media), *request.media):
        sizes[item.digest] = math.prod(item.shape)
        if item.pixels:
            pixels.setdefault(item.digest, item.pixels)
    if sum(sizes.values()) > MAX_PIXEL_BYTES:
        raise Unavailable(
            f"the pictures of requests that have not ended take {MAX_PIXEL_BYTES >> 20} MiB already; try again later",
            code="media_queue_full",
        )
    media = tuple(msgspec.structs.replace(item, pixels=pixels[item.digest]) for item in request.media)
    return msgspec.structs.replace(request, media=media)


def _keys(sequence: Sequence) -> list[Key]:
    return [(sequence.request.cache_salt, item.digest) for item in sequence.request.media]


def _encoded_bytes(sequences: Iterable[Sequence]) -> int:
    """Returns the bytes of the distinct embeddings that these sequences hold."""
    held = {
        id(embeddings): len(embeddings)
        for sequence in sequences
        if sequence.embedded
        for embeddings in sequence.embedded.encoded
    }
    return sum(held.values())
