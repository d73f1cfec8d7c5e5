"""Makes responses that no connection waits for (`background: true`), and lets clients follow and cancel them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from tureen.clients.quotas import ClientWork, serving
from tureen.dialects.openai.responses_keeping import Keeping
from tureen.dialects.openai.responses_making import Making
from tureen.dialects.openai.responses_output import (
    CANCELLED,
    COMPLETED,
    INCOMPLETE,
    EventWriter,
    failed_response,
    whole_event,
)
from tureen.errors import InvalidRequest, RequestFailed, RequestTimeout, TureenError
from tureen.http.call import call_of
from tureen.log import get_logger
from tureen.recordings.delta_log import PartLog, Reader
from tureen.requests.generation import most_tokens

MAX_EVENT_BYTES = 16 << 20
"""Most bytes of a stream that are kept while it is made, compressed; of a longer one the end is kept."""

ENDS = frozenset(f"response.{kind}" for kind in (COMPLETED, INCOMPLETE))

log = get_logger("api")


class LastEvent(NamedTuple):
    """The last event of a response: its type, and the response."""

    kind: str
    response: dict[str, Any]


class BackgroundResponse:
    """One response that is being made. Its client may leave, come back, and read its stream from any event on."""

    def __init__(self, making: Making, keeping: Keeping, writer: EventWriter) -> None:
        self.response = making.head
        self._making = making
        self._keeping = keeping
        self._writer = writer
        self.is_streamed = making.body.stream
        self._parts = PartLog(MAX_EVENT_BYTES)
        self._news = asyncio.Event()
        self._has_ended = False
        self._is_cancelled = False
        self._generating: asyncio.Task[LastEvent] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._forget: Callable[[], object] = bool

    def start(self, request: Request, registry: dict[tuple[str, str], BackgroundResponse]) -> None:
        """Begins, at the expense of the request's client. Raises TooManyRequests when it has too few tokens left."""
        state, call = self._making.state, call_of(request.scope)
        name = self._keeping.owner, str(self.response["id"])
        with contextlib.ExitStack() as stack:
            account = stack.enter_context(state.quotas.visit(call.client_id(request.scope), call.limits))
            stack.enter_context(account.running(beside=1))  # the request that asks for it counts until it is answered
            work = ClientWork(account)
            stack.callback(work.end)
            plan = self._making.plan
            work.begin(sum(most_tokens(each, index) for index, each in enumerate(plan.requests)))
            held = stack.pop_all()
        registry[name] = self
        self._forget = partial(registry.pop, name, None)
        self._generating = asyncio.create_task(self._generate(work))
        self._ending = asyncio.create_task(self._end(held, self._generating))
        background = self._keeping.store.background
        background.add(self._ending)
        self._ending.add_done_callback(background.discard)

    async def cancel(self) -> None:
        """Ends it, and returns when that is kept."""
        if self._generating is not None and self._ending is not None:
            self._is_cancelled = True
            self._generating.cancel()
            await asyncio.shield(self._ending)

    def check_kept(self, number: int) -> None:
        """Raises InvalidRequest unless event `number` is kept, or may still come."""
        if number < self._parts.start:
            raise InvalidRequest(
                f"only events from {self._parts.start} on are kept; event {number} is gone",
                field="starting_after",
                code="event_gone",
            )
        if number > self._parts.end:
            raise InvalidRequest(
                f"starting_after is beyond the {self._parts.end} events so far", field="starting_after"
            )

    async def follow(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yields the events of its stream from `number` on, as they come. Raises RequestTimeout when events were
        dropped before they were read."""
        reader = Reader(self._parts, number)
        while True:
            while not reader.is_at_end:
                if reader.is_late:
                    raise RequestTimeout(
                        "the stream was read too slowly: the next events are no longer kept", code="client_too_slow"
                    )
                yield reader.next()
            if self._has_ended:
                return
            await self._news.wait()

    async def _generate(self, work: ClientWork) -> LastEvent:
        """Makes the response. Its last event is shown once it is kept."""
        with serving(work):
            async with contextlib.aclosing(self._making.events()) as events:
                async for event in events:
                    if event["type"] in ENDS:
                        return LastEvent(event["type"], event["response"])
                    self.response = event.get("response", self.response)
                    self._show(self._writer.write(event))
        raise RequestFailed("the response did not finish; this is a fault of the server")

    async def _end(self, held: contextlib.ExitStack, generating: asyncio.Task[LastEvent]) -> None:
        """Waits for the end, keeps it, then shows it."""
        with held:
            await asyncio.wait({generating})
            if generating.cancelled() and not self._is_cancelled:
                return  # the server ends: the next one finds it, and says so
            kind, self.response = self._ending_of(generating)
            last = self._writer.write({"type": kind, "response": self.response})
            stream = b"".join([*self._read_all(), last]) if self.is_streamed and not self._parts.start else None
            try:
                await self._keeping.store.end(self._keeping.owner, self.response, stream)
            except TureenError as error:
                log.error("the end of a response in the background could not be kept: %s", error.message)
                self.response = failed_response(self._making.head, error)
                last = self._writer.write(whole_event("failed", self.response))
                # it stays in the registry, where clients find what became of it
            else:
                self._forget()
            self._has_ended = True
            self._show(last)

    def _ending_of(self, generating: asyncio.Task[LastEvent]) -> LastEvent:
        head = self._making.head
        if generating.cancelled():
            return LastEvent(f"response.{INCOMPLETE}", head | {"status": CANCELLED})
        error = generating.exception()
        if error is None:
            return generating.result()
        if not isinstance(error, TureenError):
            log.error("a response in the background failed: %s", type(error).__name__, exc_info=error)
            error = RequestFailed("an internal error ended this response; the server runs on")
        return LastEvent("response.failed", failed_response(head, error))

    def _read_all(self) -> Iterator[bytes]:
        reader = Reader(self._parts, 0)
        while not reader.is_at_end:
            yield reader.next()

    def _show(self, part: bytes) -> None:
        if self.is_streamed:
            self._parts.append(part)
        news, self._news = self._news, asyncio.Event()
        news.set()
