"""The engine's loop: takes messages, enforces deadlines, steps, publishes. It catches all exceptions of the engine."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from tureen.contract.types import (
    Abort,
    CallResult,
    Close,
    ControlCall,
    EngineFailed,
    EngineStats,
    FromEngine,
    GenerateRequest,
    OutputDelta,
    StepReport,
    Submit,
    ToEngine,
    Usage,
)
from tureen.engine import finish
from tureen.errors import RequestFailed, TureenError, Unavailable
from tureen.log import get_logger

WINDOW_S = 0.5  # time in steps over which one pace is measured
NUM_WINDOWS = 60
HEARTBEAT_S = 1.0
"""Seconds between two reports of a paused engine, which show that it is alive."""
PREPARE_S = 0.0003
"""Seconds between two checks of an idle engine whether a grammar is compiled."""

HELPERS_S = 0.25
"""Seconds between two checks of an idle engine whether a helper process is being replaced."""

log = get_logger("engine")

Take = Callable[[float | None], list[ToEngine]]
Publish = Callable[[FromEngine], None]


class SteppedEngine(Protocol):
    """The methods of an engine that the loop calls."""

    @property
    def has_work(self) -> bool: ...

    @property
    def is_preparing(self) -> bool: ...

    @property
    def helpers_down(self) -> tuple[str, ...] | None: ...

    def prepare(self) -> None: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str, reason: str = "client") -> None: ...

    def step(self) -> list[OutputDelta]: ...

    def stats(self, step_ms: float) -> EngineStats: ...

    def call(self, op: str, **args: object) -> object: ...

    def close(self) -> None: ...


class Loop:
    """Drives one engine until Close, or until it fails: then every live request gets an error and EngineFailed is
    published.

    `take(wait_s)` returns the messages that have arrived. It waits at most this long for the first one; None = without
    a limit.
    """

    def __init__(
        self, engine: SteppedEngine, take: Take, publish: Publish, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._take = take
        self._publish = publish
        self._clock = clock
        self._live: dict[str, Deadlines] = {}
        self._soonest_s = math.inf  # no live request has an earlier deadline
        self._pace = Pace()
        self._step_ms = 0.0
        self._reported_s = -math.inf
        self._helpers_down: tuple[str, ...] = ()  # as reported last
        self._is_closed = False

    def run(self) -> None:
        """Runs until Close or the engine's failure. Raises none of the engine's exceptions."""
        try:
            wait_s: float | None = 0.0
            while not self._is_closed:
                for message in self._take(wait_s):
                    self._handle(message)
                wait_s = self._turn()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(type(error).__name__)
        finally:
            self._engine.close()

    def _wait_s(self, helpers_down: tuple[str, ...] | None) -> float | None:
        """Seconds that an engine without work may wait. The deadlines of requests in a paused engine still count."""
        if not self._live:
            return None if helpers_down is None else HELPERS_S
        longest_s = PREPARE_S if self._engine.is_preparing else HEARTBEAT_S
        return min(longest_s, max(0.0, self._soonest_s - self._clock()))

    def _turn(self) -> float | None:
        """Abort late requests, run one step, and publish its deltas and the engine's figures. Do nothing after Close.

        Return the seconds that the next turn may wait for a message; None = until one arrives.
        """
        if self._is_closed:
            return None
        now = self._clock()
        if now >= self._soonest_s:
            self._abort_late(now)
        if self._engine.is_preparing:
            self._engine.prepare()
        if not self._engine.has_work:
            is_due, helpers_down = bool(self._live) and now - self._reported_s >= HEARTBEAT_S, self._engine.helpers_down
            if is_due or (helpers_down or ()) != self._helpers_down:
                self._report()
            return self._wait_s(helpers_down)
        deltas = self._engine.step()
        seconds = self._clock() - now
        num_ended = sum(delta.finish is not None for delta in deltas)
        self._pace.add(seconds, sum(map(self._note, deltas)), num_ended)
        self._step_ms = seconds * 1000
        self._report(*deltas)
        return 0.0

    def _abort_late(self, now: float) -> None:
        for request_id, limits in self._live.items():
            if limits.soonest_s <= now:
                self._engine.abort(request_id, "deadline")
        self._soonest_s = min((limits.soonest_s for limits in self._live.values()), default=math.inf)

    def _fail(self, why: str) -> None:
        """Ends every live request with an error, and the loop."""
        error = Unavailable("the engine failed while it had this request; send it again", code="engine_dead")
        self._publish(EngineFailed(why))  # first: a client may ask for the state as soon as its request ends
        self._publish(StepReport(tuple(OutputDelta(id=id, finish=finish.failed(error)) for id in self._live)))

    def _handle(self, message: ToEngine) -> None:
        if self._is_closed:
            return
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id, message.reason)
        elif isinstance(message, ControlCall):
            self._call(message)
        elif isinstance(message, Close):
            self._close()

    def _submit(self, message: Submit) -> None:
        request = message.request
        try:
            self._add(request, message.arrived_s)
        except TureenError as error:
            self._refuse(request.id, error)
        except Exception:
            log.exception("request %s could not be added", request.id)
            self._refuse(request.id, RequestFailed("the server failed on this request; other requests continue"))

    def _add(self, request: GenerateRequest, arrived_s: float | None) -> None:
        now = self._clock()
        limits = Deadlines.of(request, now if arrived_s is None else arrived_s)
        # prompts of other requests may be computed later, whenever they arrived
        before = (
            live
            for live in self._live.values()
            if live.client == request.client and not live.has_output and live.when_idle <= request.when_idle
        )
        wait_s = self._pace.seconds_for(live.num_prompt for live in before)
        if now + wait_s > limits.soonest_s and not request.resumed:
            raise _unreachable(request, wait_s)
        try:
            self._engine.add(request)
        except Unavailable as error:
            if error.code == "queue_full":
                error.retry_after_s = math.ceil(self._pace.seconds_per_end)
            raise
        self._live[request.id] = limits
        self._soonest_s = min(self._soonest_s, limits.soonest_s)

    def _refuse(self, request_id: str, error: TureenError) -> None:
        self._report(OutputDelta(id=request_id, finish=finish.failed(error)))

    def _report(self, *deltas: OutputDelta) -> None:
        self._reported_s = self._clock()
        stats = self._engine.stats(self._step_ms)
        self._helpers_down = stats.helpers_down
        stats = msgspec.structs.replace(stats, seconds_per_end=self._pace.seconds_per_end)
        self._publish(StepReport(deltas, stats))

    def _call(self, message: ControlCall) -> None:
        try:
            value = msgspec.to_builtins(self._engine.call(message.op, **message.args))
        except TureenError as error:
            self._publish(CallResult(message.number, error=finish.failed(error)))
        except Exception:
            log.exception("operation %s failed", message.op)
            self._publish(CallResult(message.number, error=finish.failed(RequestFailed("the operation failed"))))
        else:
            self._report()  # first, because a client may read the figures as soon as it has the answer
            self._publish(CallResult(message.number, value))

    def _close(self) -> None:
        for request_id in self._live:
            self._engine.abort(request_id, "shutdown")
        if self._engine.has_work:
            self._report(*self._engine.step())
        self._is_closed = True

    def _note(self, delta: OutputDelta) -> int:
        """Records a delta; returns the number of tokens whose computation it proves."""
        limits = self._live.get(delta.id)
        usage = delta.usage or Usage(0, len(delta.token_ids), 0)
        is_proof = usage.forced_tokens < usage.output_tokens or bool(delta.output_logprobs)
        num_tokens = len(delta.token_ids) if is_proof else 0  # tokens forced from the start prove nothing
        if limits is not None and delta.token_ids and not limits.has_output:
            if is_proof:
                num_tokens += limits.num_prompt - usage.cached_tokens
            self._live[delta.id] = msgspec.structs.replace(limits, has_output=True, ttft_s=math.inf)
        if delta.finish is not None:
            self._live.pop(delta.id, None)
        return num_tokens


class Deadlines(msgspec.Struct, frozen=True):
    """The deadlines of a live request for its first and its last token, in seconds of the monotonic clock."""

    num_prompt: int
    client: str = ""
    when_idle: bool = False
    ttft_s: float = math.inf
    end_s: float = math.inf
    has_output: bool = False

    @classmethod
    def of(cls, request: GenerateRequest, arrived_s: float) -> Deadlines:
        """Computes the deadlines of a request that arrived at `arrived_s`, from its time-outs."""
        ttft, end = request.ttft_deadline_ms, request.deadline_ms
        return cls(
            num_prompt=len(request.token_ids),
            client=request.client,
            when_idle=request.when_idle,
            ttft_s=math.inf if ttft is None or request.resumed else arrived_s + ttft / 1000,
            end_s=math.inf if end is None else arrived_s + end / 1000,
            has_output=bool(request.resumed),
        )

    @property
    def soonest_s(self) -> float:
        """The earlier of the two times, in seconds of the monotonic clock."""
        return min(self.ttft_s, self.end_s)


class Pace:
    """Measures how fast the engine computes tokens and how often a request ends.

    The speed is that of the fastest recent window, so estimates from it are lower bounds.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=NUM_WINDOWS)  # tokens per second
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=NUM_WINDOWS)  # seconds; requests that ended
        self.seconds_per_end = 1.0  # expected until the next one ends, at least 1
        self._seconds = 0.0
        self._tokens = 0
        self._since_tokens_s = 0.0  # time in steps without proved tokens: chunks of a prompt show only at its end

    def add(self, seconds: float, num_tokens: int, num_ended: int = 0) -> None:
        """Records a step: its seconds, its computed tokens, and the number of requests that ended."""
        before_s, before = self._ends.pop()
        self._ends.append((before_s + seconds, before + num_ended))
        if before_s + seconds >= WINDOW_S:
            self._ends.append((0.0, 0))
            self.seconds_per_end = self._expected_s()
        self._seconds += seconds
        self._tokens += num_tokens
        self._since_tokens_s = 0.0 if num_tokens else self._since_tokens_s + seconds
        if self._tokens and self._seconds >= WINDOW_S:
            self._rates.append(self._tokens / self._seconds)
            self._seconds, self._tokens = 0.0, 0

    def seconds_for(self, waiting: Iterable[int]) -> float:
        """Returns the minimum time until prompts of these lengths are computed; 0 before anything was measured."""
        num_tokens = sum(waiting)
        if not num_tokens or not self._rates:
            return 0.0
        return max(0.0, num_tokens / max(self._rates) - self._since_tokens_s)

    def _expected_s(self) -> float:
        """Returns the estimated seconds until the next request ends, from the recent rate plus one request now."""
        seconds = sum(seconds_each for seconds_each, _ in self._ends)
        return max(1.0, seconds / (1 + sum(count for _, count in self._ends)))


def _unreachable(request: GenerateRequest, wait_s: float) -> Unavailable:
    field = "deadline_ms" if request.ttft_deadline_ms is None else "ttft_deadline_ms"
    return Unavailable(
        f"{field} cannot be met: the prompts already waiting take about {wait_s:.1f} s; try again later",
        field=field,
        code="deadline_unreachable",
        retry_after_s=max(1, math.ceil(wait_s)),
    )
