"""Answers in the making and just made, apart from the connections that read them: for clients that come back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from itertools import chain
from typing import Any

from starlette.types import Message

from tureen.config import Config
from tureen.errors import Conflict, InvalidRequest, NotFound, RequestTimeout, Unprocessable, echo
from tureen.requests.quotas import ClientWork, Who
from tureen.requests.track import Reader, Track

MAX_BYTES = 4 << 20
"""Of one recording. Of a longer one the last part is kept, which a resumed stream needs."""

MAX_ENDED = 4096
MAX_TOTAL_BYTES = 64 << 20
"""Of all: the oldest that have ended go first, then the oldest that run keep little more than their newest part."""

CUT_BYTES = 64 << 10
"""Of one that runs, then."""

BLANK_LINE = b"\n\n"
EVENT_ID = re.compile(r"([0-9a-f]+)-([0-9]{1,15})")


class Recording:
    """One request's answer as the app sends it: its head, and its parts as far as they are there.

    Where streams can be resumed, each event of one is a part and gets the line `id: REQUEST-NUMBER`. When nobody has
    listened for the time of grace, the app is told that its client is gone. Event-loop thread only.
    """

    def __init__(
        self,
        request_id: str,
        owner: Who,
        work: ClientWork,
        *,
        key: tuple[str, bytes] | None,
        grace_s: float,
        grown: Callable[[int], None],
    ) -> None:
        """`grown` hears of each change of how much is kept, in bytes."""
        self.request_id = request_id
        self.owner = owner
        self.key = key  # Idempotency-Key, and what stands for the request that had it
        self.work = work
        self.head: Message | None = None
        self.track = Track(MAX_BYTES)
        self.has_events = False  # with ids
        self.is_abandoned = asyncio.Event()
        self.ended_s: float | None = None
        self._grace_s = grace_s
        self._grown = grown
        self._making: asyncio.Task[None] | None = None
        self._num_listeners = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self._making is not None and self._making.done()

    @property
    def is_success(self) -> bool:
        making = self._making
        if making is None or not making.done() or making.cancelled() or making.exception() is not None:
            return False
        return self.head is not None and self.head["status"] < 300 and not self.work.has_failed

    @property
    def is_stream(self) -> bool:
        headers = dict(self.head["headers"]) if self.head is not None else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    def start(self, making: Coroutine[Any, Any, None], then: Callable[[Recording], None]) -> None:
        """Let the app make the answer. `then` hears of its end."""

        def end(_: object) -> None:
            if self._leaving is not None:
                self._leaving.cancel()
            self._change(self.track.close)
            then(self)
            self._tell()

        self._making = asyncio.create_task(making)
        self._making.add_done_callback(end)

    async def send(self, message: Message) -> None:
        """What the app sends. Who listens and is not slow has it before more comes."""
        if message["type"] == "http.response.start":
            self.head = message
        elif body := message.get("body", b""):
            if self.track.end == 0:
                self.has_events = self._grace_s > 0 and self.is_stream and body.endswith(BLANK_LINE)
            if self.has_events:
                for event in body.removesuffix(BLANK_LINE).split(BLANK_LINE):
                    self._add(f"id: {self.request_id}-{self.track.end}\n".encode() + event + BLANK_LINE)
            else:
                self._add(body)
        self._tell()
        await asyncio.sleep(0)

    async def started(self) -> Message:
        """The head, once it is there. Raises what the app raised, and Conflict when there will be none."""
        while self.head is None and not self.is_ended:
            await self._news.wait()
        if self.head is None:
            self._check()
            raise Conflict("the request was ended before its answer began; send it again", code="request_ended")
        return self.head

    async def follow(self, number: int) -> AsyncGenerator[bytes, None]:
        """The parts from `number` on, as they come. Raises what the app raised, and RequestTimeout when they were
        dropped before they were read."""
        reader = Reader(self.track, number)
        while True:
            while not reader.is_at_end:
                if reader.is_late:
                    raise RequestTimeout(
                        "the answer was read too slowly: what comes next is no longer kept", code="client_too_slow"
                    )
                yield reader.next()
            if self.is_ended:
                self._check()
                return
            await self._news.wait()

    def after(self, event_id: str | None) -> int:
        """The number of the event behind `event_id`, None = of the first. Raises InvalidRequest."""
        if event_id is None:
            number = 0
        else:
            found = EVENT_ID.fullmatch(event_id)
            if found is None or found[1] != self.request_id or int(found[2]) >= self.track.end:
                raise InvalidRequest(
                    f"Last-Event-ID {echo(event_id)} is the id of no event of this stream",
                    field="Last-Event-ID",
                    code="invalid_last_event_id",
                )
            number = int(found[2]) + 1
        if number < self.track.start:
            raise InvalidRequest(
                f"the stream is kept from event {self.track.start} on only; event {number} is gone",
                field="Last-Event-ID",
                code="event_gone",
            )
        return number

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self._num_listeners += 1
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            yield
        finally:
            self._num_listeners -= 1
            if not self._num_listeners and not self.is_ended:
                grace_s = self._grace_s if self.has_events or self.key is not None else 0.0
                self._leaving = asyncio.get_running_loop().call_later(grace_s, self.is_abandoned.set)

    async def cancel(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    def cut(self) -> None:
        """Keep little from now on."""
        self._change(partial(self.track.limit, CUT_BYTES))

    def _add(self, part: bytes) -> None:
        self._change(partial(self.track.append, part))

    def _change(self, change: Callable[[], None]) -> None:
        before = self.track.num_bytes
        change()
        self._grown(self.track.num_bytes - before)

    def _check(self) -> None:
        """Raises what the app raised."""
        assert self._making is not None
        if not self._making.cancelled():
            self._making.result()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Recordings:
    """All that somebody may come back for. Event-loop thread only."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = config.resume_grace_s
        self._retention_s = config.idempotency_retention_s
        self._clock = clock
        self._running: dict[Recording, None] = {}
        self._ended: dict[Recording, None] = {}  # the oldest first
        self._uncut: dict[Recording, None] = {}  # of those that run
        self._num_bytes = 0  # of all
        self._by_key: dict[tuple[Who, str], Recording] = {}  # by owner and Idempotency-Key

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def repeated(self, owner: Who, key: str, fingerprint: bytes) -> Recording | None:
        """The recording of the request that had this key; None = there is none. Raises Unprocessable when it was
        another request, Conflict when it is too long to be sent again."""
        found = self._by_key.get((owner, key))
        if found is not None and found in self._ended and not self._is_kept(found):
            self._forget(found)
            return None
        if found is None or found.key is None or found.is_abandoned.is_set():
            return None
        if found.key[1] != fingerprint:
            raise Unprocessable(
                f"Idempotency-Key {echo(key)} belongs to another request, that was sent before; send a new key",
                field="Idempotency-Key",
                code="idempotency_key_reused",
            )
        if found.track.start:
            raise Conflict(
                "the answer to the request with this Idempotency-Key is too long to be sent again; wait for its end",
                field="Idempotency-Key",
                code="answer_too_long",
            )
        return found

    def new(self, request_id: str, owner: Who, work: ClientWork, key: tuple[str, bytes] | None) -> Recording:
        recording = Recording(request_id, owner, work, key=key, grace_s=self._grace_s, grown=self._grown)
        self._running[recording] = self._uncut[recording] = None
        if key is not None:
            self._by_key[owner, key[0]] = recording
        return recording

    def stream(self, owner: Who, name: str) -> Recording:
        """The newest event stream of an owner with this name: a rid or the x-request-id. Raises NotFound."""
        self.sweep()
        for recording in chain(reversed(self._running), reversed(self._ended)):
            is_named = name == recording.request_id or name in recording.work.names
            is_there = recording.has_events and not recording.is_abandoned.is_set()
            if is_named and is_there and recording.owner == owner:
                return recording
        why = (
            f"it ended, or lost its client, more than {self._grace_s:g} s ago, or never was"
            if self._grace_s
            else "this server keeps none; it was started without --resume-grace"
        )
        raise NotFound(f"there is no stream {echo(name)} to go on with: {why}", field="rid", code="stream_not_found")

    def ended(self, recording: Recording) -> None:
        """Keep it for who comes back, or not."""
        del self._running[recording]
        self._uncut.pop(recording, None)
        recording.ended_s = self._clock()
        self._ended[recording] = None
        if not recording.is_success or recording.track.start:
            self._forget_key(recording)
            recording.key = None
        if recording.track.num_bytes > MAX_BYTES or not self._is_kept(recording):
            self._forget(recording)
        while len(self._ended) > MAX_ENDED:
            self._forget(next(iter(self._ended)))
        self._grown(0)

    def sweep(self) -> None:
        """Forget what was kept long enough."""
        for recording in [one for one in self._ended if not self._is_kept(one)]:
            self._forget(recording)

    async def close(self) -> None:
        for recording in tuple(self._running):
            await recording.cancel()

    def _grown(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_TOTAL_BYTES and self._ended:
            self._forget(next(iter(self._ended)))
        while self._num_bytes > MAX_TOTAL_BYTES and self._uncut:
            oldest = next(iter(self._uncut))
            del self._uncut[oldest]
            oldest.cut()

    def _is_kept(self, recording: Recording) -> bool:
        if recording.is_abandoned.is_set() or recording.ended_s is None:
            return False
        kept_s = self._grace_s if recording.has_events else 0.0
        if recording.key is not None:
            kept_s = max(kept_s, self._retention_s)
        return self._clock() - recording.ended_s < kept_s

    def _forget(self, recording: Recording) -> None:
        del self._ended[recording]
        self._num_bytes -= recording.track.num_bytes
        self._forget_key(recording)

    def _forget_key(self, recording: Recording) -> None:
        key = recording.key
        if key is not None and self._by_key.get((recording.owner, key[0])) is recording:
            del self._by_key[recording.owner, key[0]]
