"""Runs batches on one device: forward pass, prompt log-probabilities, sampling. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.contract.runner import (
    NAN_LOGITS,
    NOTHING_TO_DRAW,
    Batch,
    Capacity,
    FinishedStep,
    Masks,
    Row,
    RowOutput,
    StepOutput,
)
from tureen.contract.types import MediaItem, PositionLogprobs
from tureen.errors import Conflict, InvalidRequest, NotFound, RequestFailed, Unavailable
from tureen.lora.adapter import Adapter, read_adapter
from tureen.models.config import ModelConfig
from tureen.runner import drawing, heads
from tureen.runner.expert_record import ExpertRecord
from tureen.runner.forward import Forward, ForwardOutput
from tureen.runner.heads import HeadLayer
from tureen.runner.parts import ForwardParts, Tag
from tureen.runner.trace import Profiler, TraceOptions
from tureen.sampling.arithmetic import Arithmetic, Logits
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.processor_pool import ProcessorPool
from tureen.sampling.sampler import Sampler
from tureen.weights.source import ModelSource

if TYPE_CHECKING:
    from tureen.runner.encoder import Encoder

NOTHING = RowOutput()

Scores = tuple[PositionLogprobs, ...]


class ModelRunner:
    """A Runner: a model with its KV pool and sampler on one device."""

    def __init__(
        self,
        forward: Forward | None,
        sampler: Sampler,
        capacity: Capacity,
        model: ModelConfig,
        parts: ForwardParts | None = None,
    ) -> None:
        """parts: the weights and the cache of the forward pass, where they can be exchanged. forward: None while a part
        is away."""
        self._forward = forward  # None while a part of it is away
        self._sampler = sampler
        self._capacity = capacity
        self.encoder: Encoder | None = None  # where the model sees
        self.head: list[HeadLayer] = []  # applied to each hidden state that is asked for
        self.pool: Any = None  # threads of the native kernels, which a draft model uses too
        self.check: Callable[[], None] | None = None  # raises when a process that belongs to the runner is lost
        self._model = model
        self._parts = parts
        self._adapters: dict[int, Adapter] = {}
        self._profiler = Profiler()
        self._experts = ExpertRecord(model)
        self._operations: dict[str, Callable[..., object]] = {
            "device": self._describe_device,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "update_weights": self._update_weights,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "forget": self._forget,
            "weight": self._weight,
            "page_memory": self._kept_pages,
            "kv_facts": self._kv_facts,
            "start_profile": self._start_profile,
            "stop_profile": self._profiler.stop,
            "start_expert_record": lambda: self._experts.start(self.forward),
            "stop_expert_record": lambda: self._experts.stop(self.forward),
            "take_expert_record": lambda: self._experts.take(self.forward),
        }

    @property
    def forward(self) -> Forward:
        """The forward pass. Weights and cache must be there."""
        assert self._forward is not None
        return self._forward

    def submit(self, batch: Batch, masks: Masks | None = None) -> FinishedStep:
        return FinishedStep(self.run(batch, masks))

    def run(self, batch: Batch, masks: Masks | None = None) -> StepOutput:
        """Computes one forward pass and samples. The sampler hears of tokens only after the forward pass has
        succeeded."""
        if self._profiler.trace is None:
            return self._run(batch, masks)
        with self._profiler.step(batch):
            return self._run(batch, masks)

    def _run(self, batch: Batch, masks: Masks | None) -> StepOutput:
        for state in batch.new_slots:
            self._sampler.set_slot(state)
        if not batch.rows:
            return StepOutput(())
        sampling = [row for row in batch.rows if row.sample]
        output = self.forward.run(batch, best_only=masks is None and self._are_plain(sampling))
        has_extras = False
        for row in batch.rows:
            if row.slot in self._sampler.following:
                self._sampler.catch_up(row.slot, row.start, row.token_ids[: row.num_known])
            if row.score_targets or row.hidden_from is not None:
                has_extras = True
        if not has_extras:
            return StepOutput(_spread(batch.rows, self._draw(sampling, output, masks)))
        extras = list(self._extras(batch, output))  # first: where it raises, nothing has been drawn
        outputs = _spread(batch.rows, self._draw(sampling, output, masks))
        return StepOutput(
            tuple(_combine(drawn, score, states) for drawn, (score, states) in zip(outputs, extras, strict=True))
        )

    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def processors(self) -> ProcessorPool | None:
        """The workers of client processors; None where clients may not send any."""
        return self._sampler.processors

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """Encodes a picture; see Runner.encode. Raises RequestFailed."""
        if self.encoder is None:
            raise RequestFailed("the model takes no pictures")
        return self.encoder.encode(item)

    def call(self, op: str, **args: object) -> object:
        """Runs a control operation, such as `device` -> {"name", "dtype"}. Raises NotFound for an unknown one."""
        if op not in self._operations:
            raise NotFound(f"the runner has no operation {op}")
        return self._operations[op](**args)

    def close(self) -> None:
        """Ends the processes that belong to the runner; the tensors are freed with the object."""
        self._sampler.close()

    def _are_plain(self, rows: Sequence[Row]) -> bool:
        """Says whether these rows want their best token and nothing else of their logits."""
        return self._sampler.plain.issuperset([row.slot for row in rows])

    def _draw(self, rows: Sequence[Row], output: ForwardOutput, masks: Masks | None) -> list[RowOutput]:
        """Draws the tokens of the rows that sample."""
        if not rows:
            return []
        if output.logits is None:
            return drawing.best_outputs(rows, output.best)
        if masks is None:
            return drawing.draw(self._sampler, rows, output, {})
        return drawing.draw(self._sampler, rows, output, masks.wait(), masks.endings)

    def _extras(self, batch: Batch, output: ForwardOutput) -> Iterator[tuple[Scores | None, tuple[bytes, ...] | None]]:
        """Yields each row's log-probabilities and hidden states, as far as it asks; None where they are not numbers."""
        hidden = iter(output.hidden)
        for row in batch.rows:
            scores = self._score(row, output.scored)
            states = () if row.hidden_from is None else _packed_states(self._after_head(next(hidden)))
            yield scores, states

    def _after_head(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.stack([heads.apply(self.head, state) for state in states]) if self.head else states

    def _score(self, row: Row, pieces: Iterator[Logits]) -> Scores | None:
        """Returns log-probabilities of the row's score targets, from its pieces of logits; None when these are not
        numbers."""
        scores: list[PositionLogprobs] = []
        num_taken, is_sound = 0, True
        while num_taken < len(row.score_targets):
            logits = next(pieces)
            targets = row.score_targets[num_taken : num_taken + len(logits)]
            position = row.start + row.score_from + num_taken + 1
            piece = self._sampler.score(logits, row.slot, targets, position)
            num_taken += len(targets)
            is_sound = is_sound and piece is not None
            scores += piece or ()
        return tuple(scores) if is_sound else None

    def _load_adapter(self, number: int, path: str) -> None:
        """Raises InvalidRequest, Unavailable."""
        try:
            adapter = read_adapter(path, self._model)
        except MemoryError:
            message = "there is no memory for this adapter; unload another one"
            raise Unavailable(message, code="out_of_memory") from None
        if self._forward is not None:
            self._forward.load_adapter(number, adapter)
        self._adapters[number] = adapter

    def _unload_adapter(self, number: int) -> None:
        if self._forward is not None:
            self._forward.unload_adapter(number)
        self._adapters.pop(number, None)

    def _describe_device(self) -> dict[str, str | None]:
        facts = {"name": self.forward.device_name, "dtype": self.forward.dtype, "activations": self.forward.activations}
        factors = self._model.rope_factors(self._capacity.context_len)
        return facts | {"rope_factors": factors, "processor": "" if self._parts is None else self._parts.processor}

    def _update_weights(self, name: str, path: str, format: Any, load_format: str | None) -> None:
        """Raises InvalidRequest, and changes nothing, when the weights cannot take the place of the old."""
        parts = self._exchangeable("weights")
        parts.update(ModelSource(name, Path(path), format), load_format)
        self._assemble(parts)

    def _release_memory(self, tags: list[Tag]) -> None:
        parts = self._exchangeable(*tags)
        self._forward = None
        parts.release(tags)
        self._assemble(parts)

    def _forget(self) -> None:
        """Empties the KV cache: nothing that was computed is used again. Where it cannot be exchanged its memory
        stays."""
        if self._parts is not None and self._profiler.trace is None and not self._experts.is_on:
            self._forward = None
            self._parts.renew_cache()
            self._assemble(self._parts)

    def _resume_memory(self, tags: list[Tag]) -> None:
        """Raises Conflict, InvalidRequest."""
        parts = self._exchangeable(*tags)
        parts.resume(tags)
        self._assemble(parts)

    def _assemble(self, parts: ForwardParts) -> None:
        """Makes the forward pass of the parts that are there."""
        forward = parts.assemble()
        if forward is not None:
            for number, adapter in self._adapters.items():
                forward.load_adapter(number, adapter)
        self._forward = forward
        parts.trim()

    def _weight(self, name: str, truncate_size: int) -> list[Any]:
        """Returns a weight's values; see ForwardParts.value. The weights must be there."""
        if self._parts is None:
            raise _cannot("give out weights")
        return self._parts.value(name, truncate_size)

    def _exchangeable(self, *tags: Tag) -> ForwardParts:
        """Raises InvalidRequest for a model of which these cannot be exchanged, Conflict while a profile is taken of
        them."""
        if self._profiler.trace is not None:
            raise Conflict("a profile is being recorded; call /stop_profile first", code="profile_running")
        if self._experts.is_on:
            message = "experts are being counted; call /stop_expert_distribution_record first"
            raise Conflict(message, code="expert_record_running")
        if self._parts is None or (self.encoder is not None and "weights" in tags):
            raise _cannot("take weights away or exchange them")
        return self._parts

    def _kv_facts(self) -> dict[str, Any]:
        """Returns ForwardParts.facts, and what decides a picture's embeddings. Raises InvalidRequest."""
        facts = self._kept_pages().facts()
        if self.encoder is not None:
            facts["facts"]["encoder"] = self.encoder.arithmetic()
        return facts

    def _kept_pages(self) -> ForwardParts:
        """Raises InvalidRequest for a model whose KV cache cannot be read."""
        if self._parts is None:
            raise InvalidRequest("--model-impl transformers keeps its KV cache to itself", code="not_supported")
        return self._parts

    def _start_profile(
        self, root: str, folder: str, prefix: str, num_steps: int | None, options: dict[str, Any]
    ) -> str:
        """Starts a trace; see Profiler.start."""
        trace_options = TraceOptions(**options)
        make = partial(self.forward.start_trace, trace_options)
        return self._profiler.start(make, root=root, folder=folder, prefix=prefix, num_steps=num_steps)


def make_sampler(config: Config, vocab_size: int, arithmetic: Arithmetic) -> Sampler:
    """Makes the sampler, with its custom logit processors. Raises StartupError for one that cannot be loaded."""
    registered = load_registered(config.logit_processor)
    pool = ProcessorPool(config.max_running_requests, vocab_size) if config.enable_custom_logit_processor else None
    return Sampler(config.max_running_requests, vocab_size, arithmetic, CustomProcessors(registered, pool))


def _cannot(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"this server cannot {what} while it runs: --model-impl transformers and vision models cannot; restart it "
        "with the other model",
        code="not_supported",
    )


def _spread(rows: Sequence[Row], drawn: list[RowOutput]) -> tuple[RowOutput, ...]:
    """Hands what was drawn to the rows that sample."""
    if len(drawn) == len(rows):
        return tuple(drawn)
    following = iter(drawn)
    return tuple(next(following) if row.sample else NOTHING for row in rows)


def _packed_states(states: NDArray[np.float32]) -> tuple[bytes, ...] | None:
    """Returns states [tokens, hidden_size], each as bytes; None where they are not finite numbers."""
    return tuple(state.tobytes() for state in states) if bool(np.isfinite(states).all()) else None


def _combine(drawn: RowOutput, score: Scores | None, states: tuple[bytes, ...] | None) -> RowOutput:
    if drawn.error not in (None, NOTHING_TO_DRAW):
        return drawn
    if score is None or states is None:
        return RowOutput(error=NAN_LOGITS)
    return msgspec.structs.replace(drawn, scores=score, hidden_states=states) if score or states else drawn
