"""The front's side of an engine: what comes back is sorted to the requests and calls that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
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


class _Stream:
    """One request's deltas. What a slow reader has not taken yet is merged: the output bounds the memory."""

    def __init__(self) -> None:
        self._pending: OutputDelta | None = None
        self._failure: errors.TureenError | None = None
        self._arrived = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        self._pending = delta if self._pending is None else merge(self._pending, delta)
        self._arrived.set()

    def fail(self, error: errors.TureenError) -> None:
        self._failure = error
        self._arrived.set()

    async def next(self) -> OutputDelta:
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._pending = self._pending, None
        if delta is not None:
            if self._failure is not None:
                self._arrived.set()
            return delta
        assert self._failure is not None
        raise self._failure


class Streams:
    """All running requests and calls of one client. Touched by the event loop's thread only."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self.stats = EngineStats()
        self.failure: str | None = None
        self.ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.progress: Progress = no_progress
        self._send = send
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    @property
    def is_waiting(self) -> bool:
        """Somebody waits for the engine."""
        return bool(self._streams or self._calls)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputDelta, None]:
        """See EngineClient.generate."""
        self._check_alive()
        if request.id in self._streams:
            raise errors.InvalidRequest(f"rid {errors.echo(request.id)} is in use", field="rid")
        stream = self._streams[request.id] = _Stream()
        has_ended = False
        try:
            self._send(Submit(request, time.monotonic()))
            while not has_ended:
                delta = await stream.next()
                has_ended = delta.finish is not None
                if delta.finish is not None and delta.finish.type == "error":
                    if delta.token_ids or delta.text:
                        yield delta
                    raise as_error(delta.finish)
                yield delta
        finally:
            del self._streams[request.id]
            if not has_ended and self.failure is None:
                self._send(Abort(request.id))

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
        match message:
            case StepReport(deltas, stats):
                self.stats = stats
                for delta in deltas:
                    stream = self._streams.get(delta.id)
                    if stream is not None:
                        stream.put(delta)
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


def merge(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Two pieces of one request's output as one."""
    return OutputDelta(
        id=first.id,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        usage=second.usage or first.usage,
        output_logprobs=first.output_logprobs + second.output_logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        finish=second.finish,
        hidden_states=first.hidden_states + second.hidden_states,
    )


def as_error(finish: FinishReason) -> errors.TureenError:
    """The exception that a finish reason of type `error` stands for."""
    kind = ERRORS_BY_STATUS.get(finish.status or 500, errors.RequestFailed)
    message = finish.message or "the request failed"
    if issubclass(kind, errors.TryLater):
        return kind(message, field=finish.field, code=finish.code, retry_after_s=finish.retry_after_s or 1)
    return kind(message, field=finish.field, code=finish.code)
