"""The engine: add, abort, step, call. A step is schedule, run, commit. No clock, no tensors, no sockets."""

from __future__ import annotations

from collections.abc import Callable

from tureen.cache.manager import CacheManager
from tureen.engine import finish
from tureen.engine.queue import LongestPrefixFirst, WaitingQueue, as_ranked, first_come, priority_first
from tureen.engine.scheduler import Planned, Scheduler
from tureen.engine.sequence import Sequence
from tureen.errors import InvalidRequest, NotFound, RequestFailed, TureenError, Unavailable, echo
from tureen.log import get_logger
from tureen.runner.base import NAN_LOGITS, Batch, Row, RowError, RowOutput, Runner
from tureen.text.detokenizer import Detokenizer
from tureen.text.tokenizer import Tokenizer
from tureen.types import EngineStats, FinishReason, GenerateRequest, OutputDelta, PauseMode, PositionLogprobs

MAX_FAILED_STEPS = 3
STEP_FAILED = RowError("request_failed")

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
        schedule_policy: str = "fcfs",
        priority_scheduling: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        capacity = runner.capacity()
        self.cache = CacheManager(capacity.num_pages, capacity.page_size, prefix_cache=prefix_cache)
        queue = WaitingQueue(
            rank=priority_first if priority_scheduling else first_come,
            order=LongestPrefixFirst(self._cached_len) if schedule_policy == "lpm" else as_ranked,
        )
        self.scheduler = Scheduler(
            self.cache,
            queue,
            max_rows=capacity.max_rows,
            token_budget=token_budget,
            by_priority=priority_scheduling,
        )
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._context_len = min(capacity.context_len, capacity.num_pages * capacity.page_size)
        self._max_queued = max_queued
        self._sequences: dict[str, Sequence] = {}  # by request id, all that have not ended
        self._ended: list[OutputDelta] = []  # last deltas of what ended between two steps
        self._num_requests = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_failed_steps = 0  # in a row
        self._is_paused = False

    @property
    def has_work(self) -> bool:
        return bool(self._ended) or (bool(self._sequences) and not self._is_paused)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest for what can never run, Unavailable when too many wait."""
        if request.id in self._sequences:
            raise InvalidRequest(f"rid {echo(request.id)} is in use by a request that has not ended", field="rid")
        if not request.token_ids:
            raise InvalidRequest("the prompt is empty; it must have at least one token", field="input_ids")
        if len(request.token_ids) + request.max_new_tokens > self._context_len:
            raise _too_long(request, self._context_len)
        if len(self.scheduler.queue) - self.scheduler.num_free_slots >= self._max_queued:
            raise Unavailable(
                f"{self._max_queued} requests are waiting already; try again later, or start the server with a "
                "larger --max-queued-requests",
                code="queue_full",
            )
        detokenizer = Detokenizer(self._tokenizer, request.params)
        self._num_requests += 1
        sequence = Sequence(request, self._num_requests, detokenizer, self._eos_token_ids)
        self._sequences[request.id] = sequence
        self.scheduler.queue.add(sequence)

    def abort(self, request_id: str, reason: str = "client") -> None:
        """End a request now; its last delta comes with the next step. Idempotent; an unknown id is a no-op."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._ended.append(self._end(sequence, finish.aborted(reason)))

    def step(self) -> list[OutputDelta]:
        """One round over all requests that run. Raises RequestFailed when the runner seems to be broken for good."""
        deltas, self._ended = self._ended, []
        if self._is_paused:
            return deltas
        plan = self.scheduler.schedule()
        if not plan:
            return deltas
        self._num_steps += 1
        for planned, output in zip(plan, self._run(plan), strict=True):
            delta = self._commit(planned.sequence, planned.row, output)
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
        """Give back what the runner holds; nothing may be called afterwards."""
        self._runner.close()

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
        return self.cache.flush()

    def stats(self) -> EngineStats:
        """Gauges and totals as of now. `step_ms` is for the loop to fill in: there is no clock here."""
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
            is_paused=self._is_paused,
        )

    def _cached_len(self, sequence: Sequence) -> int:
        return len(self.cache.match(sequence.namespace, sequence.token_ids, sequence.max_reused))

    def _run(self, plan: list[Planned]) -> tuple[RowOutput, ...]:
        """Run the plan's rows. Where that raises, each row again by itself, so that only those at fault fail."""
        try:
            outputs = self._run_rows(plan)
        except Exception as error:  # noqa: BLE001 - whatever the runner raises ends requests, not the engine
            log.warning("a step of %d rows failed (%s); running them one at a time", len(plan), type(error).__name__)
        else:
            self._num_failed_steps = 0
            return outputs
        outputs = tuple(self._run_alone(planned) for planned in plan)
        all_failed = all(output.error == STEP_FAILED for output in outputs)
        self._num_failed_steps = self._num_failed_steps + 1 if all_failed else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS and not self._can_compute():
            raise RequestFailed(f"every row of {MAX_FAILED_STEPS} steps in a row failed", code="engine_dead")
        return outputs

    def _can_compute(self) -> bool:
        """Whether the runner can compute a token that no client sent; True where there is no page to try it on."""
        table = self.cache.open(("", ""), [], 1, headroom=0, is_public=False)
        if table is None:
            return True
        try:
            self._runner.run(Batch((Row(slot=0, token_ids=(0,), start=0, pages=table.as_tuple, sample=False),)))
        except Exception:
            log.exception("the runner fails on everything")
            return False
        finally:
            self.cache.close(table)
        return True

    def _run_rows(self, plan: list[Planned]) -> tuple[RowOutput, ...]:
        new_slots = tuple(planned.sequence.slot_state() for planned in plan if planned.is_new)
        return self._runner.run(Batch(tuple(planned.row for planned in plan), new_slots)).rows

    def _run_alone(self, planned: Planned) -> RowOutput:
        try:
            return self._run_rows([planned])[0]
        except Exception:  # this row's request fails, the others go on
            log.exception("request %s failed", planned.sequence.request.id)
            return RowOutput(error=STEP_FAILED)

    def _commit(self, sequence: Sequence, row: Row, output: RowOutput) -> OutputDelta | None:
        """Take over a row's result. Returns what its client gets of it."""
        if output.error is not None:
            return self._fail(sequence, output.error)
        assert sequence.table is not None
        sequence.advance(row, output)
        self.cache.publish(sequence.table, sequence.token_ids, sequence.num_computed)
        if output.token_id is not None:
            try:
                return self._commit_token(sequence, output.token_id, output.logprobs)
            except TureenError as error:
                log.error("request %s failed: %s", sequence.request.id, error)
                return self._fail(sequence, STEP_FAILED)
        if sequence.request.max_new_tokens == 0 and sequence.num_computed == sequence.num_tokens:
            return self._end(sequence, finish.reached(sequence, context_len=self._context_len))
        return None

    def _commit_token(self, sequence: Sequence, token_id: int, logprobs: PositionLogprobs | None) -> OutputDelta:
        stops_allowed = sequence.num_output + 1 >= sequence.request.params.min_new_tokens
        is_end = stops_allowed and token_id in sequence.end_token_ids
        stop = None
        if not is_end or sequence.request.params.no_stop_trim:
            stop = sequence.detokenizer.append(token_id, stops_allowed=stops_allowed)
        sequence.token_ids.append(token_id)
        self._num_output_tokens += 1
        reason = finish.reached(
            sequence, stop=stop, end_token_id=token_id if is_end else None, context_len=self._context_len
        )
        if reason is not None:
            return self._end(sequence, reason, (token_id,), logprobs)
        return _delta(sequence, sequence.detokenizer.take(), (token_id,), logprobs)

    def _fail(self, sequence: Sequence, error: RowError) -> OutputDelta:
        """End a request whose step went wrong. What it published is forgotten; after wrong numbers, what it reused too:
        they may come from any page that it read."""
        assert sequence.table is not None
        distrust_from = 0 if error == NAN_LOGITS else sequence.table.num_matched
        self._forget(sequence, distrust_from=distrust_from)
        return _delta(sequence, "", finish=finish.row_failed(error))

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason | None,
        token_ids: tuple[int, ...] = (),
        logprobs: PositionLogprobs | None = None,
    ) -> OutputDelta:
        text = sequence.detokenizer.close()
        self._forget(sequence)
        return _delta(sequence, text, token_ids, logprobs, finish=reason)

    def _forget(self, sequence: Sequence, *, distrust_from: int | None = None) -> None:
        self.scheduler.release(sequence, distrust_from=distrust_from)
        del self._sequences[sequence.request.id]


def _delta(
    sequence: Sequence,
    text: str,
    token_ids: tuple[int, ...] = (),
    logprobs: PositionLogprobs | None = None,
    *,
    finish: FinishReason | None = None,
) -> OutputDelta:
    return OutputDelta(
        id=sequence.request.id,
        token_ids=token_ids,
        text=text,
        usage=sequence.usage,
        output_logprobs=() if logprobs is None else (logprobs,),
        prompt_logprobs=sequence.take_prompt_logprobs(),
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
