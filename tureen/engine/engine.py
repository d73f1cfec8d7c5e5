"""The engine: add, abort, step, call. A step is schedule, run, commit.

It knows no tensors and no sockets. Its clocks are those of encoders.py, which divides time between steps and pictures,
of guessing.py, which measures the cost of guesses, and of times.py, which only reports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tureen.cache.manager import CacheManager
from tureen.contract.runner import NAN_LOGITS, NOTHING_TO_DRAW, Capacity, Row, RowError, RowOutput, Runner
from tureen.contract.types import EngineStats, FinishReason, GenerateRequest, OutputDelta
from tureen.engine import finish, output, replays
from tureen.engine.adapters import NO_ADAPTER, Adapters
from tureen.engine.client_code import ClientCode
from tureen.engine.control import Control
from tureen.engine.encoders import Encoders, share_pixels
from tureen.engine.grammars import Grammars
from tureen.engine.preparing import Preparing
from tureen.engine.queue import (
    FIRST_COME,
    LeastServedFirst,
    LongestPrefixFirst,
    QueueOrder,
    Rank,
    Schedule,
    WaitingQueue,
    first_come,
    priority_first,
)
from tureen.engine.rows import RowRunner
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence
from tureen.engine.states import make_cache
from tureen.errors import ContextExceeded, InvalidRequest, NotFound, TureenError, Unavailable, echo
from tureen.grammar_service.compiler import Compiler
from tureen.grammar_service.masks import MaskThread
from tureen.log import get_logger
from tureen.text.detokenizer import Detokenizer
from tureen.text.tokenizer import Tokenizer

log = get_logger("engine")


class EngineLimits(NamedTuple):
    """Limits on requests."""

    context_len: int  # tokens of one sequence
    max_queued: int  # waiting requests, except those that run when idle
    capacity: Capacity  # of the runner


class EngineTotals:
    """Counts since the engine was created."""

    def __init__(self) -> None:
        self.requests = 0
        self.steps = 0
        self.output_tokens = 0
        self.forced_tokens = 0

    def stats(
        self, scheduler: Scheduler, preparing: Preparing, rows: RowRunner, control: Control, step_ms: float
    ) -> EngineStats:
        """Return them with the gauges of the other parts."""
        cache, windows = scheduler.cache, scheduler.cache.windows.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_queued=len(scheduler.queue.waiting) + preparing.num_sequences - len(preparing.grammars.waiting),
            num_free_pages=len(cache.pool.free),
            num_cached_pages=len(cache.tree.idle),
            num_pages=cache.pool.num_pages,
            num_used_window_pages=windows.num_pages - len(windows.free) - len(cache.windows.idle),
            num_window_pages=windows.num_pages,
            total_prompt_tokens=scheduler.num_prompt_tokens,
            total_cached_tokens=scheduler.num_cached_tokens,
            total_output_tokens=self.output_tokens,
            total_preemptions=scheduler.num_preemptions,
            total_steps=self.steps,
            step_ms=step_ms,
            total_saved_s=0.0 if rows.guesser is None else rows.guesser.saved_s,
            is_paused=control.is_paused,
            total_forced_tokens=self.forced_tokens,
            total_guessed_tokens=scheduler.num_guesses,
            total_right_guesses=scheduler.num_right_guesses,
            **preparing.stats(),
        )


class Engine:
    """Runs requests to their end, many at a time. Not thread-safe: one thread calls all of it."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        max_queued: int = 1024,
        token_budget: int = 512,
        schedule: Schedule = FIRST_COME,
        prefix_cache: bool = True,
        compiler: Compiler | None = None,
    ) -> None:
        capacity = runner.capacity()
        self.cache = make_cache(capacity, prefix_cache=prefix_cache)
        rank = priority_first if schedule.by_priority else first_come
        self.scheduler = Scheduler(
            self.cache,
            WaitingQueue(rank, _order(schedule, self.cache, rank)),
            max_rows=capacity.max_rows,
            token_budget=token_budget,
            by_priority=schedule.by_priority,
        )
        context_len = min(capacity.context_len, capacity.num_pages * capacity.page_size)
        grammars = Grammars(compiler, MaskThread(capacity.max_rows, capacity.vocab_size), eos_token_ids, context_len)
        self.preparing = Preparing(grammars, ClientCode(self.scheduler), Encoders(runner, rank), context_len)
        self.rows = RowRunner(runner, grammars, self.cache)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._limits = EngineLimits(context_len, max_queued, capacity)
        self._sequences: dict[str, Sequence] = {}  # all unfinished sequences, by request id
        self.adapters = Adapters(runner, self._sequences.values())
        self._ended: list[OutputDelta] = []  # last deltas of sequences that ended between two steps
        self._totals = EngineTotals()
        self.control = Control(runner, self.scheduler, self._sequences.values(), abort=self.abort, clear=self._clear)

    @property
    def has_work(self) -> bool:
        """Returns whether a step would do anything."""
        return bool(self._ended) or (self._may_step and len(self._sequences) > sum(map(len, self.preparing.unready)))

    @property
    def is_preparing(self) -> bool:
        """Returns whether requests wait for a grammar, client code, a replay or pages; then call `prepare` often."""
        return any(self.preparing.busy)

    @property
    def _may_step(self) -> bool:
        """Whether unfinished sequences may continue."""
        return not self.control.is_paused and (not self.scheduler.is_held or self.scheduler.num_begun > 0)

    @property
    def helpers_down(self) -> tuple[str, ...] | None:
        """The names of the helper processes that are being replaced; None without helpers. See Preparing."""
        return self.preparing.helpers_down

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InvalidRequest for a request that can never run, Unavailable if too many wait."""
        if self.control.released:
            self.control.check_there()
        if request.id in self._sequences:
            raise InvalidRequest(f"rid {echo(request.id)} is in use by a request that has not ended", field="rid")
        _check_length(request, self._limits.context_len)
        if request.resumed:
            replays.check(request, self._limits.capacity.vocab_size)
        elif not request.when_idle:
            num_others = sum(not sequence.request.when_idle for sequence in self._sequences.values())
            _check_room(num_others - self._limits.capacity.max_rows, self._limits.max_queued)
        if request.media:
            request = share_pixels(request, self._sequences.values(), self._limits.capacity.embedding_size)
        detokenizer = Detokenizer(self._tokenizer, request.params)
        adapter = self.adapters.number_of(request.adapter) if request.adapter else NO_ADAPTER
        self._totals.requests += 1
        sequence = Sequence(request, self._totals.requests, detokenizer, self._eos_token_ids, adapter)
        if self.preparing.begin(sequence):
            self.scheduler.queue.add(sequence)
        self._sequences[request.id] = sequence

    def abort(self, request_id: str, reason: str = "client") -> None:
        """Ends a request now; the next step returns its last delta. Does nothing for an unknown id."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._ended.append(self._end(sequence, finish.aborted(reason)))

    def prepare(self) -> None:
        """Queues the requests that need not wait any longer, and ends those whose preparation failed."""
        for sequence, error in self.preparing.client_code.take_ready():
            self._line_up(sequence)
            if error is not None:
                self._ended.append(self._end(sequence, finish.row_failed(error)))
        for sequence, error in self.preparing.grammars.take_ready():
            if error is None and sequence.request.resumed:
                self.preparing.replay(sequence)
                continue
            try:
                sequence.ended = finish.row_failed(error) if error else self._force(sequence)
            except TureenError as failure:
                sequence.ended = finish.failed(failure)
            self._begin(sequence)
        for sequence in self.preparing.replays.advance():
            self._totals.forced_tokens += max(0, sequence.num_output - len(sequence.request.resumed))
            self._begin(sequence)
        self._ended += self.preparing.restore()

    def step(self) -> list[OutputDelta]:
        """Runs one step; returns the new pieces of outputs. Raises RequestFailed if the runner is broken for good."""
        deltas, self._ended = self._ended, []
        if not self._may_step:
            return deltas
        plan = self.scheduler.schedule()
        if not plan.rows:
            self._encode(after_step=False)
            return deltas
        self._totals.steps += 1
        if self.preparing.encoders.waiting:
            self.preparing.encoders.begin_step()
        for sequence, row, result in zip(plan.sequences, plan.rows, self.rows.run(plan), strict=True):
            try:
                delta = self._take_over(sequence, row, result)
            except TureenError as error:
                delta = self._fail(sequence, error)
            if delta is not None:
                deltas.append(delta)
        if self.preparing.client_code.has_helpers:
            self.preparing.client_code.charge(self._sequences.values())
        if self.preparing.encoders.waiting and self.preparing.encoders.may_follow(plan.sequences[0]):
            self._encode(after_step=True)
        return deltas

    def call(self, op: str, **args: object) -> object:
        """Runs a control operation: the method named `op`. Raises NotFound for an unknown one."""
        operations: dict[str, Callable[..., object]] = {
            "stats": self.stats,
            "load_adapter": self.adapters.load,
            "unload_adapter": self.adapters.unload,
            **self.control.operations,
        }
        if op not in operations:
            raise NotFound(f"unknown operation {echo(op)}")
        return operations[op](**args)

    def close(self) -> None:
        """Releases the resources of the runner and the compiler. No method may be called afterwards."""
        self.rows.close()

    def stats(self, step_ms: float = 0.0) -> EngineStats:
        """Returns gauges and totals as of now. The caller measures `step_ms`: there is no clock here."""
        return self._totals.stats(self.scheduler, self.preparing, self.rows, self.control, step_ms)

    def _clear(self) -> int:
        """Drops all unused cache entries; returns the number of freed pages."""
        self.preparing.clear()
        self.rows.clear()
        return self.cache.flush()

    def _begin(self, sequence: Sequence) -> None:
        """Queues or ends a sequence after everything that it waited for is ready."""
        if sequence not in self.preparing.replays.waiting:
            self._line_up(sequence)
        if sequence.ended is not None and (sequence.ended.type == "error" or not sequence.needs_run):
            self._ended.append(self._end(sequence, sequence.ended))

    def _line_up(self, sequence: Sequence) -> None:
        """Queues a sequence after its client's code and its stored pages are loaded and its pictures are encoded."""
        if self.preparing.may_queue(sequence):
            self.scheduler.queue.add(sequence)

    def _encode(self, *, after_step: bool) -> None:
        """Spends some time on pictures."""
        for sequence, error in self.preparing.encoded(self.scheduler.queue.waiting, after_step=after_step):
            self.scheduler.queue.add(sequence)
            if error is not None:
                self._ended.append(self._end(sequence, finish.row_failed(error)))

    def _take_over(self, sequence: Sequence, row: Row, result: RowOutput) -> OutputDelta | None:
        """Applies a row's result to its sequence; returns its client's delta. Raises InvalidRequest, RequestFailed."""
        can_only_end = result.error == NOTHING_TO_DRAW and sequence.is_accepted
        if result.error is not None and not can_only_end:
            return self._drop(sequence, output.explained(sequence, result.error))
        assert sequence.table is not None
        sequence.advance(row, result)
        if can_only_end:
            sequence.ended = finish.complete(sequence)
        elif result.token_ids:
            self._append_drawn(sequence, result)
        elif sequence.request.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
            sequence.ended = finish.reached(sequence, context_len=self._limits.context_len)
        self.cache.publish(sequence.table, sequence.token_ids, sequence.num_computed)
        if self.scheduler.states is not None:
            self.scheduler.states.computed(sequence, row)
        if sequence.ended is not None and not sequence.needs_run:
            end = self._end(sequence, sequence.ended)
            return self.preparing.saved_first(end) if sequence.request.awaits_saving else end
        return self._delta(sequence)

    def _append_drawn(self, sequence: Sequence, result: RowOutput) -> None:
        """Appends the drawn tokens, up to the end of the output. Raises as `_take_over`."""
        for index, token_id in enumerate(result.token_ids):
            if not sequence.terms.is_plain:
                sequence.note_drawn(result, index)
            sequence.ended = output.append(sequence, token_id, self._limits.context_len, is_drawn=True)
            if sequence.constraint is not None and sequence.ended is None:
                sequence.ended = self._force(sequence)
            if sequence.ended is not None:
                break
        if len(result.token_ids) > 1:
            self.scheduler.num_right_guesses += index
            sequence.take_right_guesses(len(result.token_ids) - 1, index)

    def _force(self, sequence: Sequence) -> FinishReason | None:
        """Appends the forced tokens. Returns the finish reason if the output then ends, else None."""
        num_forced = sequence.num_forced
        reason = output.forced(sequence, context_len=self._limits.context_len)
        self._totals.forced_tokens += sequence.num_forced - num_forced
        return reason

    def _fail(self, sequence: Sequence, error: TureenError) -> OutputDelta:
        """Ends a request with an error of its output."""
        if error.status >= 500:
            log.error("request %s failed: %s", sequence.request.id, error)
        return self._drop(sequence, RowError.of(error))

    def _drop(self, sequence: Sequence, error: RowError) -> OutputDelta:
        """Ends a request whose row failed, and drops its pages: after non-finite numbers also those that it reused."""
        assert sequence.table is not None
        distrust_from = 0 if error == NAN_LOGITS else sequence.table.num_matched
        self._forget(sequence, distrust_from=distrust_from)
        return OutputDelta(sequence.request.id, usage=sequence.usage, finish=finish.row_failed(error))

    def _end(self, sequence: Sequence, reason: FinishReason) -> OutputDelta:
        lacks = bool(sequence.request.resumed) and self.preparing.replays.lacks(sequence)
        delta = None if lacks else self._delta(sequence, reason)
        self._forget(sequence)
        return delta or OutputDelta(sequence.request.id, finish=reason)

    def _delta(self, sequence: Sequence, reason: FinishReason | None = None) -> OutputDelta | None:
        delta = output.delta(sequence, reason)
        if delta is not None:
            self._totals.output_tokens += len(delta.token_ids)
            self.scheduler.queue.order.generated(sequence, len(delta.token_ids))
        return delta

    def _forget(self, sequence: Sequence, *, distrust_from: int | None = None) -> None:
        if self.rows.guesser is not None:
            self.rows.guesser.ended(sequence)
        if not self.preparing.remove(sequence):
            self.scheduler.release(sequence, distrust_from=distrust_from)
        del self._sequences[sequence.request.id]


def _cached_len(cache: CacheManager, sequence: Sequence) -> int:
    """Returns the number of cached pages of a sequence."""
    return len(cache.match(sequence.namespace, sequence.token_ids, sequence.max_reused))


def _check_room(num_waiting: int, limit: int) -> None:
    """Raises Unavailable if the queue is full."""
    if num_waiting >= limit:
        raise Unavailable(
            f"{limit} requests are already waiting; try again later, or start the server with a larger "
            "--max-queued-requests",
            code="queue_full",
        )


def _check_length(request: GenerateRequest, limit: int) -> None:
    """Raises InvalidRequest for an empty prompt, and for more tokens than one sequence can have."""
    num_prompt = len(request.token_ids)
    if not num_prompt:
        raise InvalidRequest("the prompt is empty; it must have at least one token", field="input_ids")
    if num_prompt + request.max_new_tokens > limit:
        raise ContextExceeded(
            f"the prompt has {num_prompt} tokens and max_new_tokens is {request.max_new_tokens}: together "
            f"{num_prompt + request.max_new_tokens}, but at most {limit} fit; shorten the prompt, lower "
            "max_new_tokens, or start the server with a larger --context-length or --max-total-tokens",
            field="max_new_tokens" if num_prompt < limit else "input_ids",
            num_tokens=num_prompt + request.max_new_tokens,
            capacity=limit,
        )


def _order(schedule: Schedule, cache: CacheManager, rank: Rank) -> QueueOrder:
    longest = LongestPrefixFirst(partial(_cached_len, cache))
    return {"fcfs": QueueOrder(), "lpm": longest, "fair": LeastServedFirst(rank)}[schedule.policy]
