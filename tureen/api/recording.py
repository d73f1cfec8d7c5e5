"""Answers in the making and just made, apart from the connections that read them: for clients that come back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

from starlette.types import Message

from tureen.api.call import Call
from tureen.api.track import Reader, Track
from tureen.config import Config
from tureen.errors import Conflict, InvalidRequest, NotFound, Unprocessable, echo

MAX_BYTES = 4 << 20
"""Of one recording. Of a longer one the last part is kept, which a resumed stream needs."""

MAX_ENDED = 4096
MAX_ENDED_BYTES = 64 << 20
"""Of all whose request has ended; the oldest go first."""

BLANK_LINE = b"\n\n"
EVENT_ID = re.compile(r"([0-9a-f]+)-([0-9]{1,15})")


class Recording:
    """One request's answer as the app sends it: its head, and its parts as far as they are there.

    Where streams can be resumed, each event of one is a part and gets the line `id: REQUEST-NUMBER`. When nobody has
    listened for the time of grace, the app is told that its client is gone. Event-loop thread only.
    """

    def __init__(
        self, request_id: str, owner: str, call: Call, *, key: tuple[str, bytes] | None, grace_s: float
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        self.key = key  # Idempotency-Key, and what stands for the request that had it
        self.call = call
        self.head: Message | None = None
        self.track = Track(MAX_BYTES)
        self.has_events = False  # with ids
        self.is_abandoned = asyncio.Event()
        self.ended_s: float | None = None
        self._grace_s = grace_s
        self._making: asyncio.Task[None] | None = None
        self._num_listeners = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self._making is not None and self._making.done()

    @property
    def is_success(self) -> bool:
        return self.head is not None and self.head["status"] < 300 and not self.call.has_failed

    def start(self, making: Coroutine[Any, Any, None], then: Callable[[Recording], None]) -> None:
        """Let the app make the answer. `then` hears of its end."""

        def end(_: object) -> None:
            if self._leaving is not None:
                self._leaving.cancel()
            then(self)
            self._tell()

        self._making = asyncio.create_task(making)
        self._making.add_done_callback(end)

    async def send(self, message: Message) -> None:
        """What the app sends."""
        if message["type"] == "http.response.start":
            self.head = message
        elif body := message.get("body", b""):
            if self.track.end == 0:
                self.has_events = self._grace_s > 0 and self._is_stream() and body.endswith(BLANK_LINE)
            if self.has_events:
                for event in body.removesuffix(BLANK_LINE).split(BLANK_LINE):
                    self.track.append(f"id: {self.request_id}-{self.track.end}\n".encode() + event + BLANK_LINE)
            else:
                self.track.append(body)
        self._tell()

    async def started(self) -> Message:
        """The head, once it is there. Raises what the app raised, and Conflict when there will be none."""
        while self.head is None and not self.is_ended:
            await self._news.wait()
        if self.head is None:
            self._check()
            raise Conflict("the request was ended before its answer began; send it again", code="request_ended")
        return self.head

    async def follow(self, number: int) -> AsyncGenerator[bytes, None]:
        """The parts from `number` on, as they come. Raises what the app raised, and ConnectionAbortedError when they
        were dropped before they were read."""
        reader = Reader(self.track, number)
        while True:
            while not reader.is_at_end:
                if reader.is_late:
                    raise ConnectionAbortedError("the client is too slow")
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

    def _is_stream(self) -> bool:
        headers = dict(self.head["headers"]) if self.head is not None else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

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
        self._num_bytes = 0  # of these
        self._by_key: dict[tuple[str, str], Recording] = {}  # by owner and Idempotency-Key

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def repeated(self, owner: str, key: str, fingerprint: bytes) -> Recording | None:
        """The recording of the request that had this key; None = there is none. Raises Unprocessable when it was
        another request, Conflict when it is too long to be sent again."""
        self.sweep()
        found = self._by_key.get((owner, key))
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
                "the answer to the request with this Idempotency-Key is too long to be sent again",
                field="Idempotency-Key",
                code="answer_too_long",
            )
        return found

    def new(self, request_id: str, owner: str, call: Call, key: tuple[str, bytes] | None) -> Recording:
        recording = Recording(request_id, owner, call, key=key, grace_s=self._grace_s)
        self._running[recording] = None
        if key is not None:
            self._by_key[owner, key[0]] = recording
        return recording

    def stream(self, owner: str, name: str) -> Recording:
        """The newest event stream of an owner with this name: a rid or the x-request-id. Raises NotFound."""
        self.sweep()
        for recording in reversed((*self._ended, *self._running)):
            is_named = name == recording.request_id or name in recording.call.names
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
        recording.ended_s = self._clock()
        self._ended[recording] = None
        self._num_bytes += recording.track.num_bytes
        if not recording.is_success:
            self._forget_key(recording)
        if recording.track.num_bytes > MAX_BYTES or not self._is_kept(recording):
            self._forget(recording)
        while len(self._ended) > MAX_ENDED or self._num_bytes > MAX_ENDED_BYTES:
            self._forget(next(iter(self._ended)))

    def sweep(self) -> None:
        """Forget what was kept long enough."""
        for recording in [one for one in self._ended if not self._is_kept(one)]:
            self._forget(recording)

    async def close(self) -> None:
        for recording in tuple(self._running):
            await recording.cancel()

    def _is_kept(self, recording: Recording) -> bool:
        if recording.is_abandoned.is_set() or recording.ended_s is None:
            return False
        kept_s = self._grace_s if recording.has_events else 0.0
        if recording.key is not None and recording.is_success:
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
