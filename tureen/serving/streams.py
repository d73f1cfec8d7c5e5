"""The front's side of an engine: passes what comes back to the requests and calls that wait for it.

What was not done when an engine is lost is given to the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union

import msgspec

from tureen import errors
from tureen.contract.types import (
    Abort,
    CallResult,
    ControlCall,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    OutputDelta,
    StepReport,
    Submit,
    ToEngine,
    Usage,
)
from tureen.log import get_logger
from tureen.serving.crash_bisection import POISON_AFTER, Trials
from tureen.serving.journal import Journal
from tureen.serving.replay_check import RepeatedOutput, must_repeat

if TYPE_CHECKING:
    from tureen.serving.coalescing import Gathering

ERRORS_BY_STATUS: dict[int, type[errors.TureenError]] = {
    kind.status: kind
    for kind in (*errors.TureenError.__subclasses__(), *errors.TryLater.__subclasses__())
    if kind not in (errors.StartupError, errors.TryLater)
}

Interval = Union[int, "Gathering"]
"""Tokens between two deltas; or who says when they are due."""


class Watch(Protocol):
    """A function that hears at once of each piece of an output, whenever its reader takes it."""

    def __call__(self, num_new: int, *, weight_version: str | None = None, hardware: tuple[str, ...] = ()) -> None:
        """Hears how many new tokens the piece brings. weight_version: of the weights that computed it, where these are
        not what the server says of all. hardware: what has computed the output so far, where that has changed."""


MERGE_AT = 64
"""Number of pieces not taken by a reader at which they are merged into one."""

MOST_SENT = 2
"""Most engines that a control operation is given to: it may be why they end."""

Send = Callable[[ToEngine], None]
Refuse = Callable[[], errors.TureenError]

log = get_logger("serving")

_NONE = EngineStats()
_TOTALS = tuple(name for name in EngineStats.__struct_fields__ if name.startswith("total_"))


class Live:
    """A request and its output so far, from however many engines."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.is_submitted = False  # to the engine that runs now
        self.usage: Usage | None = None
        self.token_ids = list(request.resumed)  # of the output
        self._num_chars = 0
        self._num_states = request.resumed_states
        self._cached_tokens: int | None = None  # that the first engine found; no other's cache is the client's affair
        if request.resumed:
            self._cached_tokens = request.resumed_cached
        self._repeat: RepeatedOutput | None = None

    def take(self, delta: OutputDelta) -> OutputDelta | None:
        """Returns the part of an engine's delta that the client does not have; None where it has all of it.

        Raises RequestFailed where a new engine does not repeat what an earlier one said.
        """
        if self._repeat is not None:
            rest = self._repeat.rest_of(delta)
            if rest is None:
                return None
            delta = rest
        if delta.usage is not None:
            if self._cached_tokens is None:
                self._cached_tokens = delta.usage.cached_tokens
            elif delta.usage.cached_tokens != self._cached_tokens:
                usage = msgspec.structs.replace(delta.usage, cached_tokens=self._cached_tokens)
                delta = msgspec.structs.replace(delta, usage=usage)
            self.usage = delta.usage
        self.token_ids += delta.token_ids
        self._num_chars += len(delta.text)
        self._num_states += len(delta.hidden_states)
        return delta

    def note_cached(self, num_tokens: int) -> None:
        """Notes how many tokens of the prompt were cached, before an engine computed it for others."""
        self._cached_tokens = num_tokens

    def rest(self, now_s: float) -> GenerateRequest | FinishReason:
        """Returns the request that is left for another engine; or the finish reason, where nothing is left to do.

        now_s: seconds of the monotonic clock, from which the deadlines that are left are computed.
        """
        request, self._repeat = self.request, None
        if request.deadline_ms is not None and now_s > self.arrived_s + request.deadline_ms / 1000:
            return FinishReason(type="abort", message="Aborted", reason="deadline")
        if not self.token_ids:
            return request
        if must_repeat(request):
            self._repeat = RepeatedOutput(tuple(self.token_ids), self._num_chars, self._num_states)
            return msgspec.structs.replace(request, ttft_deadline_ms=None)
        return msgspec.structs.replace(
            request,
            resumed=tuple(self.token_ids),
            resumed_cached=self._cached_tokens or 0,
            resumed_states=self._num_states,
        )


class Moved(Exception):
    """The end of a stream whose reader is to have the request go on in another engine."""


class _Stream:
    """One request's deltas, for one reader. What it has not taken yet is merged: the output bounds the memory."""

    def __init__(self, live: Live, interval: Interval, watch: Watch | None) -> None:
        self.live = live
        self.has_ended = False
        self._interval = interval if isinstance(interval, int) else 1
        self._gathering = None if isinstance(interval, int) else interval
        self._is_put_off = False  # by the gathering
        if self._gathering is not None:
            self._gathering.begin()
        self._watch = watch
        self._pending: list[OutputDelta] = []
        self._num_tokens = 0  # in these
        self._is_due = False  # the reader is to have them
        self._has_begun = False
        self._failure: errors.TureenError | Moved | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        self._pending.append(delta)
        self._num_tokens += len(delta.token_ids)
        if self._watch is not None:
            self._watch(len(delta.token_ids))
        self.has_ended = delta.finish is not None
        if self._gathering is not None and self._gathering.is_wanted() and self._has_begun and not self.has_ended:
            self._gather(self._gathering)
        elif self._num_tokens >= self._interval or not self._has_begun or not delta.token_ids or self.has_ended:
            self._wake()  # without tokens: progress of the prompt
        if len(self._pending) == MERGE_AT:
            self._pending = [merge(self._pending)]

    def fail(self, error: errors.TureenError | Moved) -> None:
        self._failure = error
        self.has_ended = True
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
        self._has_begun = self._has_begun or bool(delta.token_ids)  # progress of the prompt arrives earlier
        self._is_due = self._failure is not None
        return delta

    def _gather(self, gathering: Gathering) -> None:
        if not self._is_put_off:
            self._is_put_off = True
            gathering.put_off(self._come)

    def _come(self) -> None:
        self._is_put_off = False
        if self._pending:
            self._wake()

    def _wake(self) -> None:
        self._is_due = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Call(NamedTuple):
    """A control operation that has not been answered."""

    message: ControlCall
    future: asyncio.Future[Any]
    num_sent: int = 0  # engines it was sent to


class Streams:
    """All requests and calls that have not ended, and which engine has them.

    `open` an engine, `cut` it off when it is lost, open the next: what was left goes on there. It knows engines only by
    `send`. Only the event loop's thread calls it.
    """

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._is_heard = False  # the engine that runs now has told its figures
        self.refuse: Refuse | None = None  # what everybody gets who comes
        self.num_reports = 0  # messages from engines
        self.num_resumed = 0  # requests that went on in another engine
        self.num_poison = 0
        self.is_suspect = False  # the engine may never hear what it is sent
        self.journal = Journal()
        self._send: Send | None = None
        self._reports_before = 0  # the engine was opened
        self._before = EngineStats()  # totals of engines that were cut off
        self._trials = Trials()
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0

    @property
    def num_live(self) -> int:
        """The number of requests that were submitted and have not ended."""
        return sum(not stream.has_ended for stream in self._streams.values())

    @property
    def stats(self) -> EngineStats:
        """The newest figures. Until an engine reports its own, those who wait for it are counted here."""
        return self._stats if self._is_heard else msgspec.structs.replace(self._stats, num_queued=len(self._streams))

    @property
    def is_busy(self) -> bool:
        """Returns whether the engine has or will get work. Finished streams that no client has read do not count."""
        return bool(self._calls or self.num_live)

    @property
    def is_waiting(self) -> bool:
        """Says whether the engine is hung when nothing comes of it."""
        return self.is_busy

    @property
    def has_use(self) -> bool:
        """Says whether the engine did something for somebody, or was asked to."""
        return self.is_busy or self.is_waiting or self.num_reports > self._reports_before

    async def generate(
        self, request: GenerateRequest, interval: Interval = 1, watch: Watch | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Submits a request and streams its output; see EngineClient.generate."""
        if self.refuse is not None:
            raise self.refuse()
        request_id = request.id
        if request_id in self._streams:
            raise errors.InvalidRequest(f"rid {errors.echo(request_id)} is in use", field="rid")
        stream = self._streams[request_id] = _Stream(Live(request, time.monotonic()), interval, watch)
        del request
        has_ended = False
        try:
            self._submit(stream)
            while not has_ended:
                delta = await stream.next()
                has_ended = delta.finish is not None
                if delta.finish is not None and delta.finish.type == "error":
                    if delta.token_ids or delta.text:
                        yield msgspec.structs.replace(delta, finish=None)  # the error is the end, and the only one
                    raise as_error(delta.finish)
                yield delta
        finally:
            self._streams.pop(request_id, None)
            if not stream.has_ended:
                self._tell_abort(stream.live, "client")
            if self._trials.deaths and self._trials.ended(request_id):
                self._submit_waiting()

    def abort(self, request_id: str, reason: str) -> None:
        """Ends a request; at once where no engine has it or could hear of it."""
        stream = self._streams.get(request_id)
        if stream is None or stream.has_ended:
            return
        if not self._tell_abort(stream.live, reason) or self.is_suspect:
            end = FinishReason(type="abort", message="Aborted", reason=reason)
            stream.put(OutputDelta(request_id, usage=stream.live.usage, finish=end))

    async def call(self, op: str, **args: Any) -> object:
        """Runs a control operation of the engine; see EngineClient.call."""
        if self.refuse is not None:
            raise self.refuse()
        self._num_calls += 1
        call = _Call(ControlCall(self._num_calls, op, args), asyncio.get_running_loop().create_future())
        self._calls[self._num_calls] = call
        if self._send is not None:
            self._ask(call, self._send)
        return await call.future

    async def restore(self, send: Send, info: EngineInfo) -> None:
        """Brings a new engine to the state of those before. Raises TureenError when it cannot be."""

        async def do(op: str, **args: Any) -> object:
            self._num_calls += 1
            call = _Call(ControlCall(self._num_calls, op, args), asyncio.get_running_loop().create_future(), MOST_SENT)
            self._ask(call, send)
            return await call.future

        await self.journal.replay(do, info)

    def open(self, send: Send) -> None:
        """Begins to use an engine that is ready: what waits begins, or goes on, in it."""
        self._send, self.refuse, self.is_suspect = send, None, False
        self._reports_before = self.num_reports
        for call in list(self._calls.values()):
            self._ask(call, send)
        self._submit_waiting()

    def cut(self, reason: str, *, is_suspicious: bool) -> None:
        """Notes that the engine is lost. What it had waits for another.

        is_suspicious: whether one of the requests may be why.
        """
        self._send = None
        self._stats = self._before = _totals(self._stats)
        self._is_heard = False
        for number, call in list(self._calls.items()):
            if call.num_sent >= MOST_SENT or call.future.done():
                self._end_call(number, _lost(f"{reason}, and so was the one before it"))
        suspects = self.submitted
        for stream in self._streams.values():
            stream.live.is_submitted = False
        if not is_suspicious:
            return
        poison = self._trials.died(suspects)
        if poison is not None:
            self.num_poison += 1
            log.error("request %s is ended: it killed the engine %d times or more", poison, POISON_AFTER)
            self._streams[poison].fail(
                errors.RequestFailed(
                    f"the engine died {POISON_AFTER} times or more while it worked on this request, at last on nothing "
                    f"else ({reason}); do not send it again",
                    code="poison",
                )
            )

    @property
    def submitted(self) -> list[str]:
        """The ids of the requests that the engine has."""
        return [name for name, stream in self._streams.items() if stream.live.is_submitted and not stream.has_ended]

    def end(self, request_id: str, error: errors.TureenError) -> None:
        """Ends a request's stream with an error."""
        self._streams[request_id].fail(error)

    def hand_over(self, request_ids: Iterable[str]) -> None:
        """Ends the streams of these requests with Moved, after what has come of them; the engine ends the requests."""
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.has_ended:
                self._tell_abort(stream.live, "moved")
                stream.fail(Moved())

    def fail(self, refuse: Refuse) -> None:
        """Ends everything that waits, and refuses all that comes: there is no engine, and may be none for long."""
        for stream in self._streams.values():
            if not stream.has_ended:
                self._tell_abort(stream.live, "engine_dead")
                stream.fail(refuse())
        for number in list(self._calls):
            self._end_call(number, refuse())
        self.refuse, self._send = refuse, None
        self._stats = msgspec.structs.replace(self._stats, num_running=0, num_queued=0, num_preparing=0)

    def receive(self, message: StepReport | CallResult) -> None:
        """Passes a message of the engine to those who wait for it."""
        self.num_reports += 1
        if isinstance(message, CallResult):
            self._answer(message)
            return
        self._stats = message.stats if self._before == _NONE else _sum(self._before, message.stats)
        self._is_heard = True
        for delta in message.deltas:
            stream = self._streams.get(delta.id)
            if stream is not None and not stream.has_ended:
                self._take(stream, delta)

    def _take(self, stream: _Stream, delta: OutputDelta) -> None:
        try:
            rest = stream.live.take(delta)
        except errors.RequestFailed as error:
            self._tell_abort(stream.live, "cannot_resume")
            stream.fail(error)
            return
        if rest is None:
            return
        stream.put(rest)
        if self._trials.deaths and self._trials.survived(delta.id, len(rest.token_ids)):
            self._submit_waiting()

    def _submit_waiting(self) -> None:
        for stream in self._streams.values():
            self._submit(stream)

    def _submit(self, stream: _Stream) -> None:
        """Sends a request that the engine does not have and may have."""
        live = stream.live
        if self._send is None or live.is_submitted or stream.has_ended:
            return
        if self._trials.deaths and not self._trials.may_run(live.request.id):
            return
        rest = live.rest(time.monotonic())
        if isinstance(rest, FinishReason):
            stream.put(OutputDelta(live.request.id, usage=live.usage, finish=rest))
            return
        live.is_submitted = True
        self.num_resumed += live.usage is not None
        self._send(Submit(rest, live.arrived_s))

    def _tell_abort(self, live: Live, reason: str) -> bool:
        """Tells the engine to end a request. Returns False where no engine has it."""
        if self._send is None or not live.is_submitted:
            return False
        self._send(Abort(live.request.id, reason))
        return True

    def _ask(self, call: _Call, send: Send) -> None:
        self._calls[call.message.number] = call._replace(num_sent=call.num_sent + 1)
        send(call.message)

    def _answer(self, result: CallResult) -> None:
        call = self._calls.get(result.number)
        if call is None:
            return
        if result.error is not None:
            self._end_call(result.number, as_error(result.error))
            return
        self.journal.note(call.message.op, call.message.args, result.value)
        del self._calls[result.number]
        if not call.future.done():
            call.future.set_result(result.value)

    def _end_call(self, number: int, error: errors.TureenError) -> None:
        future = self._calls.pop(number).future
        if not future.done():
            future.set_exception(error)


def _lost(reason: str) -> errors.Unavailable:
    return errors.Unavailable(f"the engine was lost: {reason}", code="engine_lost")


def _totals(stats: EngineStats) -> EngineStats:
    """Returns the figures of an engine that stay when it is gone: the totals."""
    totals = {name: getattr(stats, name) for name in _TOTALS}
    return EngineStats(num_free_pages=stats.num_pages, num_pages=stats.num_pages, **totals)


def _sum(before: EngineStats, stats: EngineStats) -> EngineStats:
    totals = {name: getattr(before, name) + getattr(stats, name) for name in _TOTALS}
    return msgspec.structs.replace(stats, **totals)


def merge(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Returns pieces of one request's output, in order, as one delta."""
    return OutputDelta(
        id=deltas[0].id,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        usage=next((delta.usage for delta in reversed(deltas) if delta.usage is not None), None),
        output_logprobs=tuple(chain.from_iterable(delta.output_logprobs for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
        finish=deltas[-1].finish,
        hidden_states=tuple(chain.from_iterable(delta.hidden_states for delta in deltas)),
        unenforced=deltas[-1].unenforced,
        explanations=tuple(chain.from_iterable(delta.explanations for delta in deltas)),
        timeline=deltas[-1].timeline,
    )


def as_error(finish: FinishReason) -> errors.TureenError:
    """Returns the exception that a finish reason of type `error` stands for."""
    kind = ERRORS_BY_STATUS.get(finish.status or 500, errors.RequestFailed)
    message = finish.message or "the request failed"
    if issubclass(kind, errors.TryLater):
        return kind(message, field=finish.field, code=finish.code, retry_after_s=finish.retry_after_s or 1)
    return kind(message, field=finish.field, code=finish.code)
