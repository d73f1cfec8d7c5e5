"""The engine of an embedding model: each request is one text, computed in one piece."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from tureen.contract.runner import TextToEmbed
from tureen.contract.types import EngineStats, FinishReason, GenerateRequest, OutputDelta, PauseMode, Usage
from tureen.engine import finish
from tureen.engine.queue import (
    FIRST_COME,
    LeastServedFirst,
    QueueOrder,
    Schedule,
    WaitingQueue,
    first_come,
    priority_first,
)
from tureen.engine.sequence import Sequence
from tureen.errors import ContextExceeded, InvalidRequest, NotFound, RequestFailed, Unavailable, echo
from tureen.log import get_logger
from tureen.text.detokenizer import Detokenizer
from tureen.text.tokenizer import Tokenizer

DONE = FinishReason(type="length", length=0)
NO_TEXT = "this is an embedding or scoring model, which generates no text; use /v1/embeddings or /v1/rerank"

MAX_FAILED = 8
"""Number of consecutive texts whose computation may fail. After that the device counts as broken, and the engine
ends."""

log = get_logger("engine")


class Embedder(Protocol):
    """A model that computes one vector of a text, or of a pair of texts."""

    def embed(self, texts: Many[TextToEmbed]) -> list[bytes | RequestFailed]:
        """Returns the vector of each text, float32 as bytes, or the reason why it has none."""


class EmbeddingEngine:
    """The engine of an embedding model; it has the methods of `SteppedEngine`. Not thread-safe.

    A step takes waiting texts until they have the tokens of the budget; the last text may exceed it. Between steps,
    requests can arrive and be aborted. Texts that are computed when idle have separate steps, when no other text waits.
    """

    def __init__(
        self,
        embedder: Embedder,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        max_queued: int,
        token_budget: int,
        schedule: Schedule = FIRST_COME,
    ) -> None:
        self._embedder = embedder
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_queued = max_queued
        self._token_budget = token_budget
        rank = priority_first if schedule.by_priority else first_come
        self._queue = WaitingQueue(rank, LeastServedFirst(rank) if schedule.policy == "fair" else QueueOrder())
        self._waiting: dict[str, Sequence] = {}  # the queue, by id
        self._ended: list[OutputDelta] = []  # that ended between two steps
        self._is_paused = False
        self._num_requests = self._num_steps = self._num_tokens = 0
        self._num_failed = 0  # since one did not

    @property
    def has_work(self) -> bool:
        """Returns whether a step would do anything."""
        return bool(self._ended) or (bool(self._waiting) and not self._is_paused)

    @property
    def is_preparing(self) -> bool:
        return False

    @property
    def helpers_down(self) -> None: ...

    def prepare(self) -> None: ...

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InvalidRequest for a request that can never run, Unavailable if too many wait."""
        if request.hidden_states not in ("pooled", "last") or request.max_new_tokens:
            raise InvalidRequest(NO_TEXT, code="not_a_generation_model")
        if request.embeds:
            raise InvalidRequest("input_embeds: this model takes text or token ids", field="input_embeds")
        if not 1 <= len(request.token_ids) <= self._max_tokens:
            raise ContextExceeded(
                f"the text has {len(request.token_ids)} tokens; the model accepts 1 to {self._max_tokens}",
                field=None,
                num_tokens=len(request.token_ids),
                capacity=self._max_tokens,
            )
        num_waiting = sum(not sequence.request.when_idle for sequence in self._waiting.values())
        if num_waiting > self._max_queued and not request.when_idle:  # one of them runs
            raise Unavailable(
                f"{self._max_queued} requests are already waiting; try again later, or start the server with a "
                "larger --max-queued-requests",
                code="queue_full",
            )
        self._num_requests += 1
        detokenizer = Detokenizer(self._tokenizer, request.params)
        sequence = self._waiting[request.id] = Sequence(request, self._num_requests, detokenizer, ())
        self._queue.add(sequence)

    def abort(self, request_id: str, reason: str = "client") -> None:
        """Ends a request now; the next step returns its delta. Does nothing for an unknown id."""
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None:
            self._queue.remove(sequence)
            self._end(sequence.request, finish.aborted(reason))

    def step(self) -> list[OutputDelta]:
        """Computes the next texts, and returns their outputs."""
        budget = 0 if self._is_paused else self._token_budget
        first: Sequence | None = None
        taken: list[GenerateRequest] = []
        for sequence in self._queue.candidates():
            first = first or sequence
            if budget <= 0 or sequence.request.when_idle != first.request.when_idle:
                break
            budget -= sequence.num_tokens
            self._queue.remove(sequence)
            self._queue.order.admitted(sequence)
            del self._waiting[sequence.request.id]
            taken.append(sequence.request)
        self._compute(taken)
        self._num_steps += 1
        ended, self._ended = self._ended, []
        return ended

    def call(self, op: str, **args: object) -> object:
        """Runs a control operation. Raises NotFound for one that an embedding model does not have."""
        operations: dict[str, Callable[..., object]] = {
            "flush_cache": lambda: 0,
            "stats": self.stats,
            "pause": self.pause,
            "resume": self.resume,
        }
        if op not in operations:
            raise NotFound(f"an embedding model has no operation {echo(op)}")
        return operations[op](**args)

    def pause(self, mode: PauseMode) -> int:
        """Stops stepping until `resume`; mode `abort` ends waiting requests. Returns the number of unfinished
        requests."""
        num_requests = len(self._waiting)
        self._is_paused = True
        if mode == "abort":
            for request_id in tuple(self._waiting):
                self.abort(request_id, "pause")
        return num_requests

    def resume(self) -> None:
        self._is_paused = False

    def stats(self, step_ms: float = 0.0) -> EngineStats:
        return EngineStats(
            num_queued=len(self._waiting),
            total_prompt_tokens=self._num_tokens,
            total_steps=self._num_steps,
            step_ms=step_ms,
            is_paused=self._is_paused,
        )

    def close(self) -> None: ...

    def _compute(self, requests: Many[GenerateRequest]) -> None:
        """Computes texts together. If the model fails, computes each alone, so that only those at fault fail."""
        if not requests:
            return
        try:
            vectors = self._embedder.embed([TextToEmbed(each.token_ids, each.second_start) for each in requests])
            self._num_failed = 0
        except Exception:
            log.exception("the model failed on %d texts", len(requests))
            if len(requests) > 1:
                for request in requests:
                    self._compute([request])
                return
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED:
                raise
            vectors = [RequestFailed("the model failed on this text; other requests continue")]
        for request, vector in zip(requests, vectors, strict=True):
            if isinstance(vector, bytes):
                self._num_tokens += len(request.token_ids)
                self._end(request, DONE, vector)
            else:
                self._end(request, finish.failed(vector))

    def _end(self, request: GenerateRequest, reason: FinishReason, *states: bytes) -> None:
        usage = Usage(len(request.token_ids), 0, 0)
        self._ended.append(OutputDelta(request.id, usage=usage, finish=reason, hidden_states=states))
