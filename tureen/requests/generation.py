"""Runs requests for every API: submits them, follows their outputs, and aborts them when the client has left."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tureen.clients.quotas import current_work
from tureen.contract.types import (
    Explanation,
    FinishReason,
    GenerateRequest,
    OutputDelta,
    PositionLogprobs,
    Timeline,
    Usage,
)
from tureen.errors import RequestFailed, TureenError, Unavailable
from tureen.log import get_logger
from tureen.metrics import Metrics
from tureen.requests.drafts import EffectiveParams, Plan
from tureen.requests.output_parser import PLAIN, OutputReader, Reading
from tureen.requests.state import ServerState
from tureen.text.messages import Part

WHOLE_INTERVAL = 64
"""Number of tokens between two updates of an output that is not streamed."""

TIME_LIMIT = "time_limit"
"""Reason of an abort that the request asked for: its output ends as at a limit of tokens."""

EXPLANATION_SIZE = 64
"""Approximate number of numbers in the explanation of a token."""

GROWING = ("versions", "token_ids", "output_logprobs", "prompt_logprobs", "hidden_states")
"""Lists of an output that grow."""

log = get_logger("api")


async def check_grammar(output: Output, last: OutputDelta, state: ServerState, reading: Reading = PLAIN) -> None:
    """Checks an output that its grammar says is complete, with another implementation in a helper process.

    If the grammar does not enforce the whole constraint, the output may be wrong, and its `remarks` say so.
    `last`: the delta that ends it, not yet added to `output`. `reading`: distinguishes calls from an answer. Raises
    RequestFailed if the two implementations differ for any other reason.
    """
    spec, finish, token_ids = output.request.grammar, last.finish, [*output.token_ids, *last.token_ids]
    if spec is None or finish is None or finish.type != "stop" or isinstance(finish.matched, str):
        return  # text that a stop string cut need not match the grammar
    ends = state.context.info.eos_token_ids
    if finish.matched in output.request.params.stop_token_ids and finish.matched not in ends:
        return
    spec = reading.judge(spec, FinishedOutput(output.text + last.text, token_ids, finish))
    kept = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
    text = b"".join(map(state.context.tokenizer.token_bytes, kept)).decode("utf-8", "replace")
    verdict = await state.helpers.check(spec, text)
    if verdict is None or not verdict.is_verified:
        return
    complaint = verdict.complaint
    if last.unenforced:
        is_valid = None if spec.kind == "structural_tag" else complaint is None  # tags have no final check
        output.remarks = output.remarks._replace(unenforced=(), is_valid=is_valid)
    elif complaint is not None:
        state.metrics.add("num_grammar_mismatch")
        log.error("request %s: its output does not match its %s", output.rid, spec.kind)
        field = output.request.grammar_field
        raise RequestFailed(
            f"{field}: the output failed its final check: {complaint}; this is a fault of the server",
            field=field,
            code="grammar_mismatch",
        )


def _name_client_field(error: TureenError, error_fields: Mapping[str, str]) -> None:
    """Replaces the path in an error about a constraint that the server made with the client's field. `error_fields`:
    path -> field."""
    for path, field in error_fields.items():
        _, separator, problem = error.message.partition(f"{path}: ")
        if separator:
            error.message, error.field = f"{field}: {problem}", field


def most_tokens(request: GenerateRequest, index: int) -> int:
    """Returns the maximum number of tokens that a request may use, prompt and output together.

    `index`: its place in its group. Only the first sample of a prompt is charged for the prompt.
    """
    return _prompt_tokens(request, index) + request.max_new_tokens


def _prompt_tokens(request: GenerateRequest, index: int) -> int:
    return 0 if index % request.params.n else len(request.token_ids)


class FinishedOutput(msgspec.Struct):
    """The part of a finished output that reading needs."""

    text: str
    token_ids: list[int]
    finish: FinishReason | None


class Sent(NamedTuple):
    """The amount of an output that was sent."""

    tokens: int = 0
    chars: int = 0


class Remarks(NamedTuple):
    """Notes of an answer about an output: whether it matches its constraint, and how it was sampled."""

    explanations: list[Explanation]  # of each token so far, if they were asked for
    unenforced: tuple[str, ...] = ()  # unenforced parts of the constraint: "uniqueItems at /tags"
    is_valid: bool | None = None  # if something is not enforced; None: the output was cut, or the check did not finish
    effective: EffectiveParams | None = None  # None: not requested
    timeline: Timeline | None = None  # once it has ended, if it is timed
    first: tuple[float, int] | None = None  # seconds until the first tokens came, and their number
    hardware: tuple[str, ...] = ()  # that has computed it, where it moved to another one

    @property
    def metadata(self) -> dict[str, Any]:
        """Returns an answer's notes about the constraint; {} if all of it was enforced."""
        if not self.unenforced:
            return {}
        return {"unenforced": list(self.unenforced)} | ({} if self.is_valid is None else {"valid": self.is_valid})


class Output:
    """The output of one request so far, and the amount that was sent to the client."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        rid: str,
        arrived_s: float | None = None,
        effective: EffectiveParams | None = None,
    ) -> None:
        self.request = request  # without pixels
        self.index = index
        self.rid = rid
        self.text = ""
        self.token_ids: list[int] = []
        self.usage = Usage(len(request.token_ids), 0, 0)
        self.output_logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.hidden_states: list[bytes] = []
        self.remarks = Remarks([], effective=effective)
        self.finish: FinishReason | None = None
        self.started_s = time.monotonic() if arrived_s is None else arrived_s
        self.elapsed_s = 0.0
        self.sent = Sent()
        self.versions: list[tuple[str, int]] = []  # of the weights that computed it, with the number of tokens

    def note_origin(self, weight_version: str, hardware: tuple[str, ...], num_new: int) -> None:
        """Records the version of the weights that computed a new piece of `num_new` tokens, and the `hardware` if it
        changed."""
        if not self.versions or self.versions[-1][0] != weight_version:
            self.versions.append((weight_version, 0))
        self.versions[-1] = (weight_version, self.versions[-1][1] + num_new)
        if hardware:
            self.remarks = self.remarks._replace(hardware=hardware)

    def add(self, delta: OutputDelta) -> None:
        """Appends a piece of output. Raises Unavailable when the server shut down before the request ended."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.output_logprobs += delta.output_logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.hidden_states += delta.hidden_states
        self.remarks.explanations.extend(delta.explanations)
        self.usage = delta.usage or self.usage
        self.remarks = self.remarks._replace(unenforced=delta.unenforced, timeline=delta.timeline)
        self.elapsed_s = time.monotonic() - self.started_s
        if self.remarks.first is None and self.token_ids:
            self.remarks = self.remarks._replace(first=(self.elapsed_s, len(self.token_ids)))
        if delta.finish is not None and delta.finish.reason == "shutdown":
            raise Unavailable("the server was shut down before the request ended", code="draining")
        self.finish = delta.finish
        if delta.finish is not None and delta.finish.reason == TIME_LIMIT:
            self.finish = FinishReason(type="length", length=len(self.token_ids))

    @property
    def constraint_notes(self) -> dict[str, Any]:
        """Returns an answer's notes about its constraint, next to the finish reason; {} if all of it was enforced and
        no limit was near."""
        is_closed_early = self.finish is not None and self.finish.closed_early
        return self.remarks.metadata | ({"closed_early": True} if is_closed_early else {})

    @property
    def ending_notes(self) -> dict[str, Any]:
        """Returns an answer's notes next to the finish reason: the `constraint_notes`, and the sampling parameters if
        the request asks for them."""
        effective = self.remarks.effective
        return self.constraint_notes | ({} if effective is None else {"effective": effective})

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities and numbers of explanations that an answer shows for the output so far."""
        spec, num_explained = self.request.logprobs, len(self.remarks.explanations) * EXPLANATION_SIZE
        if spec is None:
            return num_explained
        num_positions = len(self.prompt_logprobs) + len(self.output_logprobs) * (2 if spec.mode == "both" else 1)
        num_drawn = len(self.output_logprobs) * max(0, self.request.params.top_k) if spec.support else 0
        return num_explained + num_drawn + num_positions * (1 + spec.top + len(spec.token_ids))

    def snapshot(self) -> Output:
        """Returns a copy for a thread to read, because the output itself continues to grow on the event loop."""
        copied = copy.copy(self)
        for name in GROWING:
            setattr(copied, name, list(getattr(self, name)))
        copied.remarks = self.remarks._replace(explanations=list(self.remarks.explanations))
        return copied

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the output tokens' natural log-probabilities; the request must have asked for them."""
        return math.fsum(position.token[0] or 0.0 for position in self.output_logprobs)


def joined_notes(outputs: Sequence[Output]) -> dict[str, Any]:
    """Returns the `constraint_notes` of an answer that has one place for all its outputs: `valid` if all are, and
    `closed_early` if any is."""
    notes = [output.constraint_notes for output in outputs]
    joined = {key: value for some in notes for key, value in some.items()}
    if "valid" in joined:
        joined["valid"] = all(some.get("valid", False) for some in notes)
    return joined


class OutputEvent(NamedTuple):
    """An update of one output: the whole output so far, and its new parts."""

    output: Output
    parts: list[Part]
    reader: OutputReader  # of this output


class RequestTrace(Protocol):
    """The trace of one HTTP request that is recorded."""

    trace_id: str

    def add(self, output: Output, finish: str, model_name: str) -> None:
        """Adds an output that has ended. `finish`: its finish reason."""


class Meter:
    """Measures time to first token and inter-token latency of one output as its tokens arrive from the engine."""

    def __init__(self, metrics: Metrics, started_s: float, *, is_timed: bool) -> None:
        """`is_timed`: whether its times are observed, not only its tokens counted."""
        self.num_tokens = 0
        self.first_s: float | None = None  # arrival of the first token, on the monotonic clock
        self._is_timed = is_timed
        self._last_s = started_s
        self._first = metrics.histogram("time_to_first_token_seconds")
        self._next = metrics.histogram("inter_token_latency_seconds")

    def note(self, num_new: int) -> None:
        """Records that `num_new` tokens have arrived now; their latency is shared equally among them."""
        if not num_new:
            return
        now = time.monotonic()
        self.first_s = self.first_s or now
        if not self._is_timed:
            pass
        elif self.num_tokens:
            self._next.observe((now - self._last_s) / num_new)
        else:
            self._first.observe(now - self._last_s)
        self.num_tokens += num_new
        self._last_s = now


class Run:
    """Runs the requests of one body together. If one fails or the client leaves, all of them end."""

    def __init__(self, state: ServerState, plan: Plan) -> None:
        self.work = current_work()
        self._state = state
        self.owner = plan.owner
        self.meters: dict[int, Meter] = {}  # of outputs that have begun, by their index
        self._log_metrics = plan.log_metrics
        self._error_fields = plan.error_fields
        self._reading = plan.reading
        self._displacement: TureenError | None = None
        self.outputs = [
            Output(request, index, rid, plan.arrived_s - self.work.load_wait_s, plan.effective.get(index))
            for index, (request, rid) in enumerate(zip(plan.requests, plan.rids, strict=True), plan.first_index)
        ]
        self._media, plan.media[:] = dict(enumerate(plan.media, plan.first_index)), []
        self._names = {
            name: tuple(self.outputs[index].request.id for index in indices) for name, indices in plan.names.items()
        }

    async def events(self, interval: int | None = None) -> AsyncGenerator[OutputEvent, None]:
        """Yields `updates`, each with the new parts that the output's reader found. Every API makes its answers and
        streams from these events."""
        readers = {output.index: self._reading.reader() for output in self.outputs}
        async with contextlib.aclosing(self.updates(interval)) as updates:
            async for output in updates:
                reader = readers[output.index]
                yield OutputEvent(output, reader.catch_up(output), reader)

    async def updates(self, interval: int | None = None) -> AsyncGenerator[Output, None]:
        """Yields an output at its first token, after every `interval` further tokens and at its end; None = the
        interval of the request or else of the server. Also yields it after each part of its prompt, if the request asks
        for progress. Closing the generator aborts unfinished requests.

        Raises the TureenError of the first request that fails, TooManyRequests for a client whose quota has too few
        tokens left.
        """
        self._state.check_names(self.owner, self._names)  # a refused request must displace no other
        coming = self._state.room.coming(len(self.outputs), when_idle=self.work.when_idle)
        with self._holding(), coming as self._submit:
            self._state.enter(self.owner, self._names)
            self.work.names.update(self._names)
            self._state.common.runs[self] = self._state
            follow = self._follow(self.outputs[0], interval) if len(self.outputs) == 1 else self._follow_all(interval)
            try:
                async with contextlib.aclosing(follow) as stream:
                    async for output in stream:
                        yield output
            finally:
                del self._state.common.runs[self]
                self._state.room.leaving.difference_update(output.request.id for output in self.outputs)
                self._state.leave(self.owner, self._names)

    @property
    def is_waiting(self) -> bool:
        """Whether these requests hold places in the queue, and the HTTP request has no tokens or finished outputs
        yet."""
        work = self.work
        has_begun = work.num_tokens or work.prompt_tokens or any(output.finish is not None for output in self.outputs)
        return not (has_begun or work.when_idle or self._displacement)

    def displace(self, error: TureenError) -> None:
        """End these waiting requests with an error."""
        self._displacement = error
        self.abort("displaced")

    def abort(self, reason: str) -> None:
        """Aborts the unfinished requests; `reason` is in their finish reason."""
        for output in self.outputs:
            self._state.client.abort(output.request.id, reason)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Reserves the maximum number of tokens that the outputs may use in the client's quota, until they end. Raises
        TooManyRequests."""
        max_tokens = {output.index: most_tokens(output.request, output.index) for output in self.outputs}
        self._holds = self.work.begin_outputs(max_tokens)
        try:
            yield
        finally:
            for hold in self._holds.values():
                hold.give_back()

    async def whole(self, interval: int = WHOLE_INTERVAL) -> list[Output]:
        """Waits until all outputs have ended, and returns them. Raises as `updates`."""
        async with contextlib.aclosing(self.updates(interval)) as updates:
            async for _ in updates:
                pass
        return self.outputs

    async def _follow_all(self, interval: int | None) -> AsyncGenerator[Output, None]:
        arrived: asyncio.Queue[Output | TureenError] = asyncio.Queue()
        waiting: set[int] = set()  # indices of outputs in the queue

        async def follow(output: Output) -> None:
            try:
                async with contextlib.aclosing(self._follow(output, interval)) as stream:
                    async for updated in stream:
                        if updated.index not in waiting:
                            waiting.add(updated.index)
                            arrived.put_nowait(updated)
            except TureenError as error:
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(follow(output)) for output in self.outputs]
        num_ended = 0
        try:
            while num_ended < len(tasks):
                update = await arrived.get()
                if isinstance(update, TureenError):
                    raise update
                waiting.discard(update.index)
                num_ended += update.finish is not None
                yield update
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, output: Output, interval: int | None) -> AsyncGenerator[Output, None]:
        due = interval or output.request.params.stream_interval or self._state.interval
        is_timed = not self.work.when_idle
        meter = Meter(self._state.metrics, output.started_s, is_timed=is_timed) if self._log_metrics else None
        if meter is not None:
            self.meters[output.index] = meter
        hold, num_prompt = self._holds[output.index], _prompt_tokens(output.request, output.index)
        leaving = self._state.room.leaving

        def watch(num_new: int, *, weight_version: str | None = None, hardware: tuple[str, ...] = ()) -> None:
            nonlocal num_prompt
            leaving.discard(output.request.id)
            self._note_tokens(output, num_new)
            output.note_origin(weight_version or self._state.context.config.weight_version, hardware, num_new)
            if meter is not None:
                meter.note(num_new)
            if num_new and self._displacement is None:
                hold.pay(num_prompt + num_new)
                num_prompt = 0

        stream: Any = self._state.client.generate(self._take(output), due, watch)
        finish = "abort"  # stays true if the generator is closed early
        try:
            self._check_place()
            self._submit()  # frees the reserved place; the stream submits the request in its first turn
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    self._check_place(delta)
                    await check_grammar(output, delta, self._state, self._reading)  # before the end is processed
                    output.add(delta)
                    if output.finish is not None:
                        finish = output.finish.type
                        if finish == "abort":
                            self.work.has_failed = True
                        else:
                            hold.pay(num_prompt)
                            num_prompt = 0
                        hold.give_back()
                    yield output
        except TureenError as error:
            finish = "error"
            _name_client_field(error, self._error_fields)
            self.work.has_failed = True
            raise
        finally:
            self._note_end(output, finish)
            if meter is not None:
                self._count(output, finish, meter.num_tokens)

    def _check_place(self, delta: OutputDelta | None = None) -> None:
        """Raise the error of a displaced run, unless `delta` ends it with a whole output. Drop the tokens of the step
        that ran meanwhile."""
        if self._displacement is not None and (delta is None or delta.finish is None or delta.finish.type == "abort"):
            raise self._displacement

    def _note_tokens(self, output: Output, num_new: int) -> None:
        self.work.num_tokens += num_new
        if num_new and self.work.first_token_s is None:
            self.work.first_token_s = time.monotonic() - output.started_s

    def _note_end(self, output: Output, finish: str) -> None:
        log.debug("request %s ended: %s after %d tokens", output.rid, finish, len(output.token_ids))
        if not output.index % output.request.params.n:  # the samples of a prompt share it
            self.work.prompt_tokens += output.usage.prompt_tokens
            self.work.cached_tokens += output.usage.cached_tokens
        trace: RequestTrace | None = self.work.trace
        if trace is not None:
            trace.add(output, finish, self._state.context.info.model_name)

    def _take(self, output: Output) -> GenerateRequest:
        """Returns the output's request with its pixels, and releases them here: the engine owns them from now on."""
        media = self._media.pop(output.index, ())
        return msgspec.structs.replace(output.request, media=media) if media else output.request

    def _count(self, output: Output, finish: str, num_tokens: int) -> None:
        metrics, tally = self._state.metrics, self.work.account.tally
        tally.requests += 1
        tally.failed += finish == "error"
        tally.prompt_tokens += output.usage.prompt_tokens
        tally.cached_tokens += output.usage.cached_tokens
        tally.output_tokens += num_tokens
        metrics.count_finish(finish)
        if finish == "abort":
            metrics.add("num_aborted_requests")
        metrics.add("prompt_tokens", output.usage.prompt_tokens)
        metrics.add("cached_tokens", output.usage.cached_tokens)
        metrics.add("generation_tokens", num_tokens)
        metrics.observe("prompt_tokens_histogram", output.usage.prompt_tokens)
        metrics.observe("generation_tokens_histogram", num_tokens)
        if not output.request.when_idle:
            metrics.observe("e2e_request_latency_seconds", time.monotonic() - output.started_s)
