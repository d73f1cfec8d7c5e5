"""Encodes the pictures of waiting requests, in small pieces between steps, and each picture once."""

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
"""Seconds of encoding allowed for each second of steps while both have work: the time between tokens at most
doubles."""

KEPT_BYTES = 256 << 20
"""Maximum bytes of embeddings that are cached for later requests, and maximum bytes that may wait for their rows to be
computed."""

MAX_PIXEL_BYTES = 1 << 30
"""Maximum bytes of pixels of all unfinished requests. Requests that show the same picture share its pixels."""

MAX_EMBEDDING_BYTES = 2 << 30
"""Maximum bytes of embeddings of all unfinished requests. A request keeps its embeddings, because it needs them again
after a preemption. Requests of a client that show the same picture share them."""

MAX_ENCODE_S = 600.0
FAILED = RowError("request_failed", "its picture could not be encoded")

log = get_logger("engine")

Key = tuple[str, str]
"""The salt that separates the caches of clients, and the picture's digest."""


class PictureEncoder(Protocol):
    """The engine's interface to a model's vision encoder."""

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """Yields None after each piece of work, and last the embeddings; see Runner.encode."""


class Current(NamedTuple):
    """The picture that is being encoded."""

    key: Key
    sequence: Sequence
    pieces: Iterator[bytes | None]


class EncodedSequence(NamedTuple):
    """A sequence that need not wait any longer: it has all its embeddings, or `error` says why it cannot get them."""

    sequence: Sequence
    error: RowError | None = None


class Encoders:
    """Sequences whose pictures are not all encoded yet, and a cache of embeddings of earlier pictures.

    Pictures are encoded one after the other. `rank`, the order of the queue, decides which is next.
    """

    def __init__(self, runner: PictureEncoder, rank: Rank, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_pictures = 0  # in prompts whose pictures have embeddings
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
        """Returns whether the sequence already has all its embeddings; otherwise it waits here for them."""
        is_ready = self._complete(sequence)
        if not is_ready:
            self.waiting[sequence] = None
        return is_ready

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits here and has ended."""
        del self.waiting[sequence]
        if self._current is not None and self._current.sequence is sequence:
            successor = next((waiting for waiting in self.waiting if self._current.key in _keys(waiting)), None)
            self._current = None if successor is None else self._current._replace(sequence=successor)

    def clear(self) -> None:
        """Drops the embeddings of earlier pictures."""
        self._kept.clear()
        self._kept_bytes = 0

    def begin_step(self) -> None:
        """Records the beginning of a step. The time for encoding is a share of the step's time."""
        if self.waiting:
            self._step_began_s = self._clock()

    def may_follow(self, sequence: Sequence) -> bool:
        """Returns whether to encode pictures after a step of these sequences. Pictures of requests that run when idle
        are encoded only after steps of such requests."""
        return any(sequence.request.when_idle or not waiting.request.when_idle for waiting in self.waiting)

    def advance(self, queued: Iterable[Sequence], *, after_step: bool) -> list[EncodedSequence]:
        """Encodes for as long as the last step allows, or one piece if no step ran.

        queued: sequences that have all their embeddings and wait to run. Encodes nothing while they hold KEPT_BYTES.
        Returns the sequences that need not wait any longer.
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
        """Does one piece of work. Returns the sequences that need not wait any longer after it."""
        current = self._current = self._current or self._begin()
        try:
            embeddings = self._take_piece(current)
        except Exception as error:  # only this request fails
            log.exception("a picture of request %s could not be encoded", current.sequence.request.id)
            self._current = None
            del self.waiting[current.sequence]
            why = f": {error.message}" if isinstance(error, RequestFailed) else ""
            return [EncodedSequence(current.sequence, msgspec.structs.replace(FAILED, message=FAILED.message + why))]
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
        """Encodes a picture piece by piece. An error of the call to `encode` itself is raised with the first piece."""
        yield from self._runner.encode(item)

    def _take_piece(self, current: Current) -> bytes | None:
        """Raises RequestFailed if encoding takes too long, and if the embeddings are not finite numbers."""
        embeddings = next(current.pieces)
        if embeddings is None and self._current_s > MAX_ENCODE_S:
            raise RequestFailed(
                f"it is not done after {MAX_ENCODE_S:.0f} s; send a smaller one, or ask the operator for "
                "--max-picture-pixels"
            )
        if embeddings is not None and not np.isfinite(np.frombuffer(embeddings, np.float32)).all():
            raise RequestFailed("a picture's embeddings are not finite")
        return embeddings

    def _complete(self, sequence: Sequence) -> bool:
        """Gives a sequence its missing embeddings that exist. Returns whether it then has all of them; if so, drops its
        pixels."""
        embedded = sequence.embedded
        assert embedded is not None
        for key in _keys(sequence)[len(embedded.encoded) :]:
            kept = self._kept.get(key)
            if kept is None:
                return False
            self._kept.move_to_end(key)
            embedded.encoded.append(kept)
            self.num_pictures += not embedded.media[len(embedded.encoded) - 1].rows_before
        embedded.media = tuple(msgspec.structs.replace(item, pixels=b"") for item in embedded.media)
        sequence.request = msgspec.structs.replace(sequence.request, media=embedded.media)
        return True

    def _keep(self, key: Key, embeddings: bytes) -> None:
        self._kept[key] = embeddings
        self._kept_bytes += len(embeddings)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)


def share_pixels(request: GenerateRequest, others: Iterable[Sequence], embedding_size: int) -> GenerateRequest:
    """Returns the request with the pixels of other requests that show the same pictures in place of its own.

    embedding_size: the length of the embedding of a picture's token. Raises Unavailable if the pixels or the embeddings
    of all requests together would take too much memory.
    """
    if not request.media:
        return request
    sizes: dict[str, int] = {}
    rows: dict[Key, int] = {}
    pixels: dict[str, bytes] = {}
    for shown in (*(other.request for other in others), request):
        for item in shown.media:
            sizes[item.digest] = math.prod(item.shape)
            rows[shown.cache_salt, item.digest] = item.num_rows
            if item.pixels:
                pixels.setdefault(item.digest, item.pixels)
    num_bytes = sum(sizes.values()), 4 * sum(rows.values()) * embedding_size
    for taken, most in zip(num_bytes, (MAX_PIXEL_BYTES, MAX_EMBEDDING_BYTES), strict=True):
        if taken > most:
            raise Unavailable(
                f"the pictures of requests that have not ended would take more than {most >> 20} MiB; try again later, "
                "or send fewer or smaller ones",
                code="media_queue_full",
            )
    media = tuple(
        item if item.rows_before else msgspec.structs.replace(item, pixels=pixels[item.digest])
        for item in request.media
    )
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
