"""The engine: add, abort, step, call. A step is schedule, run, commit. No clock, no tensors, no sockets."""

from __future__ import annotations

from collections.abc import Callable

from tureen.cache.manager import CacheManager
from tureen.engine import finish, output
from tureen.engine.grammars import Grammars
from tureen.engine.queue import (
    FIRST_COME,
    LongestPrefixFirst,
    Schedule,
    WaitingQueue,
    as_ranked,
    first_come,
    priority_first,
)
from tureen.engine.rows import RowRunner
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence
from tureen.errors import InvalidRequest, NotFound, TureenError, Unavailable, echo
from tureen.grammar.compiler import Compiler
from tureen.grammar.masks import MaskThread
from tureen.log import get_logger
from tureen.runner.base import NAN_LOGITS, NOTHING_TO_DRAW, Row, RowError, RowOutput, Runner
from tureen.text.detokenizer import Detokenizer
from tureen.text.tokenizer import Tokenizer
from tureen.types import EngineStats, FinishReason, GenerateRequest, OutputDelta, PauseMode, PositionLogprobs

log = get_logger("engine")


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
        self.cache = CacheManager(capacity.num_pages, capacity.page_size, prefix_cache=prefix_cache)
        queue = WaitingQueue(
            rank=priority_first if schedule.by_priority else first_come,
            order=LongestPrefixFirst(self._cached_len) if schedule.policy == "lpm" else as_ranked,
        )
        self.scheduler = Scheduler(
            self.cache,
            queue,
            max_rows=capacity.max_rows,
            token_budget=token_budget,
            by_priority=schedule.by_priority,
        )
        self.grammars = Grammars(compiler, MaskThread(capacity.max_rows, capacity.vocab_size), eos_token_ids)
        self._rows = RowRunner(runner, self.grammars, self.cache)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._context_len = min(capacity.context_len, capacity.num_pages * capacity.page_size)
        self._max_queued = max_queued
        self._sequences: dict[str, Sequence] = {}  # by request id, all that have not ended
        self._ended: list[OutputDelta] = []  # last deltas of what ended between two steps
        self._num_requests = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_forced_tokens = 0
        self._is_paused = False

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or (len(self._sequences) > len(self.grammars) and not self._is_paused)

    @property
    def is_preparing(self) -> bool:
        """Requests wait for their grammar; `prepare` must be called often."""
        return len(self.grammars) > 0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest for what can never run, Unavailable when too many wait."""
        if request.id in self._sequences:
            raise InvalidRequest(f"rid {echo(request.id)} is in use by a request that has not ended", field="rid")
        if not request.token_ids:
            raise InvalidRequest("the prompt is empty; it must have at least one token", field="input_ids")
        if len(request.token_ids) + request.max_new_tokens > self._context_len:
            raise _too_long(request, self._context_len)
        if len(self.scheduler.queue) + len(self.grammars) - self.scheduler.num_free_slots >= self._max_queued:
            raise Unavailable(
                f"{self._max_queued} requests are waiting already; try again later, or start the server with a "
                "larger --max-queued-requests",
                code="queue_full",
            )
        detokenizer = Detokenizer(self._tokenizer, request.params)
        self._num_requests += 1
        sequence = Sequence(request, self._num_requests, detokenizer, self._eos_token_ids)
        if request.grammar is None:
            self.scheduler.queue.add(sequence)
        else:
            self.grammars.add(sequence, request.grammar)
        self._sequences[request.id] = sequence

    def abort(self, request_id: str, reason: str = "client") -> None:
        """End a request now; its last delta comes with the next step. Idempotent; an unknown id is a no-op."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._ended.append(self._end(sequence, finish.aborted(reason)))

    def prepare(self) -> None:
        """Queue the requests whose grammar has become ready, and end those whose grammar was refused."""
        for sequence, error in self.grammars.take_ready():
            self.scheduler.queue.add(sequence)
            try:
                sequence.ended = finish.row_failed(error) if error else self._grow(sequence)
            except TureenError as failure:
                sequence.ended = finish.failed(failure)
            if not sequence.needs_run or (sequence.ended and sequence.ended.type == "error"):
                self._ended.append(self._end(sequence, sequence.ended))

    def step(self) -> list[OutputDelta]:
        """One round over all requests that run. Raises RequestFailed when the runner seems to be broken for good."""
        deltas, self._ended = self._ended, []
        if self._is_paused:
            return deltas
        plan = self.scheduler.schedule()
        if not plan:
            return deltas
        self._num_steps += 1
        for planned, result in zip(plan, self._rows.run(plan), strict=True):
            try:
                delta = self._take_over(planned.sequence, planned.row, result)
            except TureenError as error:
                delta = self._fail(planned.sequence, error)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def call(self, op: str, **args: object) -> object:
        """A control operation: the method named `op`. Raises NotFound for an unknown one."""
        operations: dict[str, Callable[..., object]] = {
            "flush_cache": self.flush_cache,
            "stats": self.stats,
            "pause": self.pause,
            "resume": self.resume,
        }
        if op not in operations:
            raise NotFound(f"unknown operation {echo(op)}")
        return operations[op](**args)

    def close(self) -> None:
        """Give back what the runner and the compiler hold; nothing may be called afterwards."""
        self._rows.close()

    def pause(self, mode: PauseMode) -> int:
        """Take no step until `resume`; new requests wait. Returns how many requests were not ended then.

        What runs ends (`abort`), gives its pages back and waits to be computed again (`retract`), or keeps its pages
        (`in_place`).
        """
        num_requests = len(self._sequences)
        self._is_paused = True
        if mode == "abort":
            for request_id in tuple(self._sequences):
                self.abort(request_id, "pause")
        elif mode == "retract":
            self.scheduler.preempt_all()
        return num_requests

    def resume(self) -> None:
        """Go on after `pause`; nothing when there was none."""
        self._is_paused = False

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns the number of pages freed. Raises InvalidRequest while requests run."""
        if self.scheduler.running:
            raise InvalidRequest(
                f"the cache cannot be flushed while {len(self.scheduler.running)} requests run; wait until they end"
            )
        self.grammars.clear()
        return self.cache.flush()

    def stats(self, step_ms: float = 0.0) -> EngineStats:
        """Gauges and totals as of now. The caller measures `step_ms`: there is no clock here."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_queued=len(self.scheduler.queue),
            num_free_pages=self.cache.pool.num_free,
            num_cached_pages=self.cache.tree.num_evictable,
            num_pages=self.cache.pool.num_pages,
            total_prompt_tokens=self.scheduler.num_prompt_tokens,
            total_cached_tokens=self.scheduler.num_cached_tokens,
            total_output_tokens=self._num_output_tokens,
            total_preemptions=self.scheduler.num_preemptions,
            total_steps=self._num_steps,
            step_ms=step_ms,
            is_paused=self._is_paused,
            total_forced_tokens=self._num_forced_tokens,
            **self.grammars.stats(),
        )

    def _cached_len(self, sequence: Sequence) -> int:
        return len(self.cache.match(sequence.namespace, sequence.token_ids, sequence.max_reused))

    def _take_over(self, sequence: Sequence, row: Row, result: RowOutput) -> OutputDelta | None:
        """A row's result becomes the sequence's. Returns what its client gets of it.

        Raises InvalidRequest, RequestFailed.
        """
        can_only_end = result.error == NOTHING_TO_DRAW and sequence.is_accepted
        if result.error is not None and not can_only_end:
            return self._drop(sequence, result.error)
        assert sequence.table is not None
        sequence.advance(row, result)
        self.cache.publish(sequence.table, sequence.token_ids, sequence.num_computed)
        if can_only_end:
            sequence.ended = finish.complete(sequence)
        elif result.token_id is not None:
            if result.logprobs is not None:
                sequence.scores.add_drawn(result.logprobs)
            sequence.ended = self._grow(sequence, result.token_id)
        elif sequence.request.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
            sequence.ended = finish.reached(sequence, context_len=self._context_len)
        if not sequence.needs_run:
            return self._end(sequence, sequence.ended)
        token_ids, logprobs = self._take_output(sequence)
        text = sequence.detokenizer.take(sequence.text_end)
        return _delta(sequence, text, token_ids, logprobs) if token_ids else None

    def _grow(self, sequence: Sequence, token_id: int | None = None) -> FinishReason | None:
        """Append a drawn token, and what the grammar forces after it. Why the output ends there; None = it goes on."""
        if token_id is not None and sequence.constraint is None:
            return output.drawn(sequence, token_id, context_len=self._context_len)
        num_forced = sequence.num_forced
        if token_id is None:
            reason = output.forced(sequence, context_len=self._context_len)
        else:
            reason = output.drawn(sequence, token_id, context_len=self._context_len)
        self._num_forced_tokens += sequence.num_forced - num_forced
        return reason

    def _fail(self, sequence: Sequence, error: TureenError) -> OutputDelta:
        """End a request whose output could not be taken over."""
        if error.status >= 500:
            log.error("request %s failed: %s", sequence.request.id, error)
        return self._drop(sequence, RowError.of(error))

    def _drop(self, sequence: Sequence, error: RowError) -> OutputDelta:
        """End a request whose step went wrong. What it published is forgotten; after wrong numbers, what it reused too:
        they may come from any page that it read."""
        assert sequence.table is not None
        distrust_from = 0 if error == NAN_LOGITS else sequence.table.num_matched
        self._forget(sequence, distrust_from=distrust_from)
        return _delta(sequence, "", finish=finish.row_failed(error))

    def _take_output(self, sequence: Sequence) -> tuple[tuple[int, ...], tuple[PositionLogprobs, ...]]:
        """What may be sent of the output and was not."""
        token_ids, logprobs = sequence.scores.take_output(sequence.token_ids)
        self._num_output_tokens += len(token_ids)
        return token_ids, logprobs

    def _end(self, sequence: Sequence, reason: FinishReason | None) -> OutputDelta:
        token_ids, logprobs = self._take_output(sequence)
        text = sequence.detokenizer.close(sequence.text_end)
        self._forget(sequence)
        return _delta(sequence, text, token_ids, logprobs, finish=reason)

    def _forget(self, sequence: Sequence, *, distrust_from: int | None = None) -> None:
        if sequence in self.grammars:
            self.grammars.remove(sequence)
        else:
            self.scheduler.release(sequence, distrust_from=distrust_from)
        del self._sequences[sequence.request.id]


def _delta(
    sequence: Sequence,
    text: str,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[PositionLogprobs, ...] = (),
    *,
    finish: FinishReason | None = None,
) -> OutputDelta:
    if sequence.is_plain:
        return OutputDelta(sequence.request.id, token_ids, text, sequence.usage, finish=finish)
    return OutputDelta(
        id=sequence.request.id,
        token_ids=token_ids,
        text=text,
        usage=sequence.usage,
        output_logprobs=logprobs,
        prompt_logprobs=sequence.scores.take_prompt(),
        finish=finish,
        hidden_states=sequence.hidden.take(is_last=finish is not None),
    )


def _too_long(request: GenerateRequest, limit: int) -> InvalidRequest:
    num_prompt = len(request.token_ids)
    return InvalidRequest(
        f"the prompt has {num_prompt} tokens and max_new_tokens is {request.max_new_tokens}: together "
        f"{num_prompt + request.max_new_tokens}, but at most {limit} fit; shorten the prompt, lower "
        "max_new_tokens, or start the server with a larger --context-length or --max-total-tokens",
        field="max_new_tokens" if num_prompt < limit else "input_ids",
        code="prompt_too_long",
    )
