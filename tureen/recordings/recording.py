"""Records answers independently of the connections that read them, so that clients can resume a stream or repeat a
request with the same Idempotency-Key."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from tureen.clients.quotas import ClientId, ClientWork
from tureen.config import Config
from tureen.errors import Conflict, InvalidRequest, NotFound, RequestTimeout, Unprocessable, echo
from tureen.recordings.delta_log import PartLog, Reader

if TYPE_CHECKING:
    from tureen.storage.responses import ResponseStore

MAX_BYTES = 4 << 20
"""Maximum bytes kept of one recording. Of a longer one, the end is kept, which a resumed stream needs."""

MAX_ENDED = 4096
MAX_TOTAL_BYTES = 64 << 20
"""Maximum bytes of all recordings. Beyond it, the oldest ended ones are dropped, then the oldest running ones are
cut."""

CUT_BYTES = 64 << 10
"""Bytes that a running recording keeps after it was cut."""

BLANK_LINE = b"\n\n"
EVENT_ID = re.compile(r"([0-9a-f]+)-([0-9]{1,15})")


class Recording:
    """The answer to one request as the app sends it: status and headers, and the parts of the body sent so far.

    If the stream can be resumed, each server-sent event is a part and gets a line `id: REQUEST-NUMBER`, which clients
    send back as Last-Event-ID (https://html.spec.whatwg.org/multipage/server-sent-events.html). If no client has read
    for `grace_s` seconds, the app gets a disconnect. Event-loop thread only.
    """

    def __init__(
        self,
        request_id: str,
        owner: ClientId,
        work: ClientWork,
        *,
        key: tuple[str, bytes] | None,
        grace_s: float,
        on_growth: Callable[[int], None],
    ) -> None:
        """`on_growth` is called with each change of the bytes kept."""
        self.request_id = request_id
        self.owner = owner
        self.key = key  # Idempotency-Key, and the fingerprint of its request
        self.work = work
        self.head: Message | None = None
        self.track = PartLog(MAX_BYTES)
        self.has_events = False  # its parts are server-sent events with ids
        self.is_abandoned = asyncio.Event()
        self.ended_s: float | None = None
        self._grace_s = grace_s
        self._on_growth = on_growth
        self._making: asyncio.Task[None] | None = None
        self._num_listeners = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether the app has sent the whole answer, or failed."""
        return self._making is not None and self._making.done()

    @property
    def is_success(self) -> bool:
        """Whether the answer is complete, has a 2xx status, and none of its engine requests failed."""
        making = self._making
        if making is None or not making.done() or making.cancelled() or making.exception() is not None:
            return False
        return self.head is not None and self.head["status"] < 300 and not self.work.has_failed

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        headers = dict(self.head["headers"]) if self.head is not None else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    def start(self, making: Coroutine[Any, Any, None], then: Callable[[Recording], None]) -> None:
        """Runs `making`, in which the app makes the answer, in a task. Calls `then` when it ends."""

        def end(_: object) -> None:
            if self._leaving is not None:
                self._leaving.cancel()
            self._change(self.track.close)
            then(self)
            self._tell()

        self._making = asyncio.create_task(making)
        self._making.add_done_callback(end)

    async def send(self, message: Message) -> None:
        """Receives an ASGI message of the app. Lets listeners send it before the app continues."""
        if message["type"] == "http.response.start":
            self.head = message
        elif body := message.get("body", b""):
            if self.track.end == 0:
                self.has_events = self._grace_s > 0 and self.is_stream and body.endswith(BLANK_LINE)
            if self.has_events:
                for event in body.removesuffix(BLANK_LINE).split(BLANK_LINE):
                    is_comment = event.startswith(b":")  # clients fail on an event with an id and without data
                    name = b"" if is_comment else f"id: {self.request_id}-{self.track.end}\n".encode()
                    self._add(name + event + BLANK_LINE)
            else:
                self._add(body)
        self._tell()
        await asyncio.sleep(0)

    async def started(self) -> Message:
        """Waits for the answer's head, an `http.response.start` message. Raises the app's exception, and Conflict if
        the request ended without a head."""
        while self.head is None and not self.is_ended:
            await self._news.wait()
        if self.head is None:
            self._check()
            raise Conflict("the request was aborted before its answer began; send it again", code="request_ended")
        return self.head

    async def follow(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yields the parts from `number` on, as they arrive. Raises the app's exception, and RequestTimeout if parts
        were dropped before they were read."""
        reader = Reader(self.track, number)
        while True:
            while not reader.is_at_end:
                if reader.is_late:
                    raise RequestTimeout(
                        "the answer was read too slowly: the next events are no longer kept", code="client_too_slow"
                    )
                yield reader.next()
            if self.is_ended:
                self._check()
                return
            await self._news.wait()

    def after(self, event_id: str | None) -> int:
        """Returns the number of the event after `event_id`; None = of the first event. Raises InvalidRequest."""
        if event_id is None:
            number = 0
        else:
            match = EVENT_ID.fullmatch(event_id)
            if match is None or match[1] != self.request_id or int(match[2]) >= self.track.end:
                raise InvalidRequest(
                    f"Last-Event-ID {echo(event_id)} is not an event of this stream",
                    field="Last-Event-ID",
                    code="invalid_last_event_id",
                )
            number = int(match[2]) + 1
        if number < self.track.start:
            raise InvalidRequest(
                f"only events from {self.track.start} on are kept; event {number} is gone",
                field="Last-Event-ID",
                code="event_gone",
            )
        return number

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Counts a listener inside the block. The grace period begins when the last one leaves."""
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
        """Cancels the task that makes the answer, and waits for its end."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    def cut(self) -> None:
        """Keeps only the newest CUT_BYTES from now on."""
        self._change(partial(self.track.limit, CUT_BYTES))

    def _add(self, part: bytes) -> None:
        self._change(partial(self.track.append, part))

    def _change(self, change: Callable[[], None]) -> None:
        before = self.track.num_bytes
        change()
        self._on_growth(self.track.num_bytes - before)

    def _check(self) -> None:
        """Raises the app's exception, if it raised one."""
        assert self._making is not None
        if not self._making.cancelled():
            self._making.result()

    def _tell(self) -> None:
        """Wakes the listeners."""
        self._news.set()
        self._news = asyncio.Event()


def open_responses(config: Config) -> ResponseStore | None:
    """Opens the file of --responses-store; None if no responses are stored. Raises StartupError."""
    if config.responses_store is None:
        return None
    storage = importlib.import_module("tureen.storage.responses")  # SQLite, for servers that keep something only
    store: ResponseStore = storage.ResponseStore(
        config.responses_store,
        ttl_s=config.responses_ttl_s,
        max_bytes=config.responses_max_mib << 20,
        max_context_bytes=config.max_body_bytes,
    )
    return store


class Recordings:
    """All answers that a client may fetch later: recordings in memory, and the file of `responses`. Event-loop thread
    only."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.responses = open_responses(config)
        self._grace_s = config.resume_grace_s
        self._retention_s = config.idempotency_retention_s
        self._clock = clock
        self._running: dict[Recording, None] = {}
        self._ended: dict[Recording, None] = {}  # the oldest first
        self._uncut: dict[Recording, None] = {}  # those of _running that were not cut
        self._num_bytes = 0  # of all recordings
        self._by_key: dict[tuple[ClientId, str], Recording] = {}  # by owner and Idempotency-Key

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def repeated(self, owner: ClientId, key: str, fingerprint: bytes) -> Recording | None:
        """Returns the recording of the request with this Idempotency-Key, or None.

        `fingerprint`: hash of the request. Raises Unprocessable if the key belongs to another request, Conflict if the
        answer was too long to be kept.
        """
        recording = self._by_key.get((owner, key))
        if recording is not None and recording in self._ended and not self._is_kept(recording):
            self._forget(recording)
            return None
        if recording is None or recording.key is None or recording.is_abandoned.is_set():
            return None
        if recording.key[1] != fingerprint:
            raise Unprocessable(
                f"Idempotency-Key {echo(key)} belongs to an earlier, different request; send a new key",
                field="Idempotency-Key",
                code="idempotency_key_reused",
            )
        if recording.track.start:
            raise Conflict(
                "the answer to the request with this Idempotency-Key is too long to be sent again; wait for its end",
                field="Idempotency-Key",
                code="answer_too_long",
            )
        return recording

    def new(self, request_id: str, owner: ClientId, work: ClientWork, key: tuple[str, bytes] | None) -> Recording:
        """Begins a recording. `key`: the Idempotency-Key and the fingerprint of its request, None = without one."""
        recording = Recording(request_id, owner, work, key=key, grace_s=self._grace_s, on_growth=self._grown)
        self._running[recording] = self._uncut[recording] = None
        if key is not None:
            self._by_key[owner, key[0]] = recording
        return recording

    def stream(self, owner: ClientId, name: str) -> Recording:
        """Returns the owner's newest event stream of this name, a rid or an x-request-id. Raises NotFound."""
        self.sweep()
        for recording in chain(reversed(self._running), reversed(self._ended)):
            is_named = name == recording.request_id or name in recording.work.names
            is_there = recording.has_events and not recording.is_abandoned.is_set()
            if is_named and is_there and recording.owner == owner:
                return recording
        why = (
            f"it ended, or lost its client, more than {self._grace_s:g} s ago, or never was"
            if self._grace_s
            else "this server keeps no streams; it was started without --resume-grace"
        )
        raise NotFound(f"there is no stream {echo(name)} to resume: {why}", field="rid", code="stream_not_found")

    def ended(self, recording: Recording) -> None:
        """Moves a recording from the running to the ended ones, or drops it if no client can fetch it later."""
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
        """Drops expired recordings."""
        for recording in [ended for ended in self._ended if not self._is_kept(ended)]:
            self._forget(recording)

    async def close(self) -> None:
        """Cancels all answers that are being recorded, and waits for background answers."""
        for recording in tuple(self._running):
            await recording.cancel()
        if self.responses is not None:
            await self.responses.close()

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
