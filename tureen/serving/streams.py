"""The front's side of an engine: what comes back is sorted to the requests and calls that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import chain
from typing import Any

from tureen import errors
from tureen.log import Progress, no_progress
from tureen.types import (
    Abort,
    Call,
    CallResult,
    EngineInfo,
    EngineStats,
    Failed,
    FinishReason,
    FromEngine,
    GenerateRequest,
    OutputDelta,
    Phase,
    Ready,
    StepReport,
    Submit,
    ToEngine,
)

ERRORS_BY_STATUS: dict[int, type[errors.TureenError]] = {
    kind.status: kind
    for kind in (*errors.TureenError.__subclasses__(), *errors.TryLater.__subclasses__())
    if kind not in (errors.StartupError, errors.TryLater)
}

Watch = Callable[[int], None]
"""Hears at once how many tokens each piece of an output brings, whenever its reader takes it."""

MERGE_AT = 64
"""So many pieces that a reader has not taken become one."""


class _Stream:
    """One request's deltas, for one reader. What it has not taken yet is merged: the output bounds the memory."""

    def __init__(self, interval: int, watch: Watch | None) -> None:
        self._interval = interval
        self._watch = watch
        self._pending: list[OutputDelta] = []
        self._num_tokens = 0  # in these
        self._is_due = False  # the reader is to have them
        self._has_begun = False
        self._failure: errors.TureenError | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        self._pending.append(delta)
        self._num_tokens += len(delta.token_ids)
        if self._watch is not None:
            self._watch(len(delta.token_ids))
        if self._num_tokens >= self._interval or not self._has_begun or delta.finish is not None:
            self._wake()
        if len(self._pending) == MERGE_AT:
            self._pending = [merge(self._pending)]

    def fail(self, error: errors.TureenError) -> None:
        self._failure = error
        self._wake()

    async def next(self) -> OutputDelta:
        if not self._is_due:
            self._reader = self._loop.create_future()
            await self._reader
        if not self._pending:
            assert self._failure is not None
            raise self._failure
        delta = self._pending[0] if len(self._pending) == 1 else merge(self._pending)
        self._pending.clear()
        self._num_tokens = 0
        self._has_begun = True
        self._is_due = self._failure is not None
        return delta

    def _wake(self) -> None:
        self._is_due = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Streams:
    """All running requests and calls of one client. Touched by the event loop's thread only."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.stats = EngineStats()
        self.failure: str | None = None
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.progress: Progress = no_progress
        self._send = send
        self._streams: dict[str, _Stream] = {}
        self._live: set[str] = set()  # requests whose end has not come, whether or not their reader has heard of it
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    @property
    def num_live(self) -> int:
        """See EngineClient.num_live."""
        return len(self._live)

    @property
    def is_waiting(self) -> bool:
        """Somebody waits for the engine."""
        return bool(self._streams or self._calls)

    async def generate(
        self, request: GenerateRequest, interval: int = 1, watch: Watch | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """See EngineClient.generate."""
        self._check_alive()
        if request.id in self._streams:
            raise errors.InvalidRequest(f"rid {errors.echo(request.id)} is in use", field="rid")
        request_id = request.id
        stream = self._streams[request_id] = _Stream(interval, watch)
        has_ended = False
        self._live.add(request_id)
        try:
            self._send(Submit(request, time.monotonic()))
            del request  # its pixels belong to the engine
            while not has_ended:
                delta = await stream.next()
                has_ended = delta.finish is not None
                if delta.finish is not None and delta.finish.type == "error":
                    if delta.token_ids or delta.text:
                        yield delta
                    raise as_error(delta.finish)
                yield delta
        finally:
            del self._streams[request_id]
            self._live.discard(request_id)
            if not has_ended and self.failure is None:
                self._send(Abort(request_id))

    async def call(self, op: str, **args: Any) -> object:
        """See EngineClient.call."""
        self._check_alive()
        self._num_calls += 1
        number = self._num_calls
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(Call(number, op, args))
        try:
            return await future
        finally:
            del self._calls[number]

    def receive(self, message: FromEngine) -> None:
        """Hand a message of the engine to who waits for it."""
        if isinstance(message, StepReport):
            self.stats = message.stats
            for delta in message.deltas:
                if delta.finish is not None:
                    self._live.discard(delta.id)
                stream = self._streams.get(delta.id)
                if stream is not None:
                    stream.put(delta)
            return
        match message:
            case CallResult(number, value, error):
                self._answer(number, value, error)
            case Phase(name, done, total):
                self.progress(name, done, total)
            case Ready(info):
                if not self.ready.done():
                    self.ready.set_result(info)
            case Failed(text, startup):
                self.fail(text, startup=startup)

    def fail(self, message: str, *, startup: bool = False) -> None:
        """The engine is gone: everybody who waits gets an error, everybody who comes too."""
        if self.failure is not None:
            return
        self.failure = message
        if not self.ready.done():
            self.ready.set_exception(errors.StartupError(message))
        for stream in self._streams.values():
            stream.fail(self._dead())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._dead())

    def _answer(self, number: int, value: Any, error: FinishReason | None) -> None:
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(as_error(error))
        else:
            future.set_result(value)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise self._dead()

    def _dead(self) -> errors.Unavailable:
        return errors.Unavailable(
            f"the engine does not run any more ({self.failure}); the server must be restarted",
            code="engine_dead",
            retry_after_s=10,
        )


def merge(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Pieces of one request's output, in order, as one."""
    return OutputDelta(
        id=deltas[0].id,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        usage=next((delta.usage for delta in reversed(deltas) if delta.usage is not None), None),
        output_logprobs=tuple(chain.from_iterable(delta.output_logprobs for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
        finish=deltas[-1].finish,
        hidden_states=tuple(chain.from_iterable(delta.hidden_states for delta in deltas)),
    )


def as_error(finish: FinishReason) -> errors.TureenError:
    """The exception that a finish reason of type `error` stands for."""
    kind = ERRORS_BY_STATUS.get(finish.status or 500, errors.RequestFailed)
    message = finish.message or "the request failed"
    if issubclass(kind, errors.TryLater):
        return kind(message, field=finish.field, code=finish.code, retry_after_s=finish.retry_after_s or 1)
    return kind(message, field=finish.field, code=finish.code)
