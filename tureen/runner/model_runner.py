"""Runs batches on one device: forward pass, prompt log-probabilities, sampling. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tureen.config import Config
from tureen.errors import Conflict, InvalidRequest, NotFound, RequestFailed
from tureen.lora.adapter import Adapter, read_adapter
from tureen.models.config import ModelConfig
from tureen.runner.base import NAN_LOGITS, NOTHING_TO_DRAW, Batch, Capacity, Row, RowOutput, StepOutput
from tureen.runner.encoder import Encoder
from tureen.runner.forward import Forward
from tureen.runner.parts import ForwardParts, Tag
from tureen.runner.trace import Profiler, TraceOptions
from tureen.sampling.arithmetic import Arithmetic, Logits, Peaks
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.processor_pool import ProcessorPool
from tureen.sampling.sampler import Sampler, outputs_of
from tureen.types import MediaItem, PositionLogprobs
from tureen.weights.source import ModelSource

SCORE_LOGITS = 1 << 22  # most logits computed at once for prompt log-probabilities
NOTHING = RowOutput()


class ModelRunner:
    """A model with its KV pool and sampler on one device."""

    def __init__(
        self,
        forward: Forward | None,
        sampler: Sampler,
        capacity: Capacity,
        model: ModelConfig,
        parts: ForwardParts | None = None,
    ) -> None:
        """parts: of the forward pass, where they can be exchanged."""
        self._forward = forward  # None while a part of it is away
        self._sampler = sampler
        self._capacity = capacity
        self.encoder: Encoder | None = None  # where the model sees
        self._model = model
        self._parts = parts
        self._adapters: dict[int, Adapter] = {}
        self._profiler = Profiler()
        self._operations: dict[str, Callable[..., object]] = {
            "device": self._describe_device,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "update_weights": self._update_weights,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "forget": self._forget,
            "weight": self._weight,
            "start_profile": self._start_profile,
            "stop_profile": self._profiler.stop,
        }

    @property
    def forward(self) -> Forward:
        """All of it must be there."""
        assert self._forward is not None
        return self._forward

    def run(self, batch: Batch) -> StepOutput:
        """One forward pass and sampling. The sampler hears of the batch only once the forward pass has succeeded."""
        if self._profiler.trace is None:
            return self._run(batch)
        with self._profiler.step(batch):
            return self._run(batch)

    def _run(self, batch: Batch) -> StepOutput:
        if batch.rows:
            self.forward.run(batch)
        for state in batch.new_slots:
            self._sampler.set_slot(state)
        has_extras = False
        for row in batch.rows:
            if row.slot in self._sampler.following:
                self._sampler.catch_up(row.slot, row.start, row.token_ids)
            if row.score_targets or row.hidden_from is not None:
                has_extras = True
        return self._run_with_extras(batch) if has_extras else StepOutput(_spread(batch.rows, self._sample(batch)))

    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def processors(self) -> ProcessorPool | None:
        """The workers of client processors, where clients may send some."""
        return self._sampler.processors

    def encode(self, item: MediaItem) -> Iterator[bytes | None]:
        """See Runner.encode. Raises RequestFailed."""
        if self.encoder is None:
            raise RequestFailed("the model does not see")
        return self.encoder.encode(item)

    def call(self, op: str, **args: object) -> object:
        """Operations: `device` -> {"name", "dtype"}. Raises NotFound for an unknown one."""
        if op not in self._operations:
            raise NotFound(f"the runner has no operation {op}")
        return self._operations[op](**args)

    def close(self) -> None:
        """End the processes that belong to it; the tensors go with the object."""
        self._sampler.close()

    def _run_with_extras(self, batch: Batch) -> StepOutput:
        held = None
        if any(row.sample for row in batch.rows):
            logits, peaks = self.forward.sampled()
            held = self.forward.keep(logits), peaks
        firsts = accumulate((len(row.token_ids) for row in batch.rows), initial=0)
        extras = [
            (self._score(row, first), self._hidden_states(row, first))
            for row, first in zip(batch.rows, firsts, strict=False)
        ]
        outputs = _spread(batch.rows, self._sample(batch, held))
        return StepOutput(
            tuple(_combine(drawn, score, states) for drawn, (score, states) in zip(outputs, extras, strict=True))
        )

    def _sample(self, batch: Batch, held: tuple[Logits, Peaks] | None = None) -> list[RowOutput]:
        """Draws for the rows that sample, from the logits of the last step, or those `held` since."""
        rows = [row for row in batch.rows if row.sample]
        slots = [row.slot for row in rows]
        if not rows:
            return []
        if held is None and batch.masks is None and self._sampler.plain.issuperset(slots):
            return outputs_of(self.forward.best())
        masks = batch.masks.wait() if batch.masks else {}
        logits, peaks = held or self.forward.sampled()
        positions = [row.start + len(row.token_ids) for row in rows]
        return self._sampler.sample(logits, slots, positions, masks, peaks)

    def _score(self, row: Row, first: int) -> tuple[PositionLogprobs, ...] | None:
        """Log-probabilities of the row's score targets, computed in pieces; None when its logits are not numbers."""
        size = max(1, SCORE_LOGITS // self._capacity.vocab_size)
        scores: list[PositionLogprobs] = []
        for begin in range(0, len(row.score_targets), size):
            targets = row.score_targets[begin : begin + size]
            at = first + row.score_from + begin
            logits = self.forward.logits(range(at, at + len(targets)))
            if not self.forward.are_finite(logits):
                return None
            scores += self._sampler.score(logits, row.slot, targets)
        return tuple(scores)

    def _hidden_states(self, row: Row, first: int) -> tuple[bytes, ...] | None:
        """Returns the hidden states of the positions that the row asks for; None where they are not finite."""
        if row.hidden_from is None:
            return ()
        states = self.forward.last_hidden(range(first + row.hidden_from, first + len(row.token_ids)))
        return tuple(state.tobytes() for state in states) if bool(np.isfinite(states).all()) else None

    def _load_adapter(self, number: int, path: str) -> None:
        """Raises InvalidRequest."""
        adapter = read_adapter(path, self._model)
        if self._forward is not None:
            self._forward.load_adapter(number, adapter)
        self._adapters[number] = adapter

    def _unload_adapter(self, number: int) -> None:
        if self._forward is not None:
            self._forward.unload_adapter(number)
        self._adapters.pop(number, None)

    def _describe_device(self) -> dict[str, str]:
        return {"name": self.forward.device_name, "dtype": self.forward.dtype}

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
        """Nothing that was computed is used again. Where the cache cannot be exchanged its memory stays."""
        if self._parts is not None and self._profiler.trace is None:
            self._forward = None
            self._parts.renew_cache()
            self._assemble(self._parts)

    def _resume_memory(self, tags: list[Tag]) -> None:
        """Raises Conflict, InvalidRequest."""
        parts = self._exchangeable(*tags)
        parts.resume(tags)
        self._assemble(parts)

    def _assemble(self, parts: ForwardParts) -> None:
        """The forward pass of the parts that are there."""
        forward = parts.assemble()
        if forward is not None:
            for number, adapter in self._adapters.items():
                forward.load_adapter(number, adapter)
        self._forward = forward
        parts.trim()

    def _weight(self, name: str, truncate_size: int) -> list[Any]:
        """See ForwardParts.value. The weights must be there."""
        if self._parts is None:
            raise _cannot("give out weights")
        return self._parts.value(name, truncate_size)

    def _exchangeable(self, *tags: Tag) -> ForwardParts:
        """Raises InvalidRequest for a model of which these cannot be exchanged, Conflict while a profile is taken of
        them."""
        if self._profiler.trace is not None:
            raise Conflict("a profile is being taken; end it by /stop_profile first", code="profile_running")
        if self._parts is None or (self.encoder is not None and "weights" in tags):
            raise _cannot("take weights away or exchange them")
        return self._parts

    def _start_profile(
        self, root: str, folder: str, prefix: str, num_steps: int | None, options: dict[str, Any]
    ) -> str:
        """See Profiler.start."""
        given = TraceOptions(**options)
        make = partial(self.forward.start_trace, given)
        return self._profiler.start(make, root=root, folder=folder, prefix=prefix, num_steps=num_steps)


def make_sampler(config: Config, vocab_size: int, arithmetic: Arithmetic) -> Sampler:
    """Raises StartupError for a --logit-processor that cannot be loaded."""
    registered = load_registered(config.logit_processor)
    pool = ProcessorPool(config.max_running_requests, vocab_size) if config.enable_custom_logit_processor else None
    return Sampler(config.max_running_requests, vocab_size, arithmetic, CustomProcessors(registered, pool))


def _cannot(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"this server cannot {what} while it runs: --model-impl transformers cannot, nor can models that see; start it "
        "again with the other model",
        code="not_supported",
    )


def _spread(rows: Sequence[Row], drawn: list[RowOutput]) -> tuple[RowOutput, ...]:
    """Spreads what was drawn over the rows that sample."""
    if len(drawn) == len(rows):
        return tuple(drawn)
    following = iter(drawn)
    return tuple(next(following) if row.sample else NOTHING for row in rows)


def _combine(
    drawn: RowOutput, score: tuple[PositionLogprobs, ...] | None, states: tuple[bytes, ...] | None
) -> RowOutput:
    if drawn.error not in (None, NOTHING_TO_DRAW):
        return drawn
    if score is None or states is None:
        return RowOutput(error=NAN_LOGITS)
    return msgspec.structs.replace(drawn, scores=score, hidden_states=states) if score or states else drawn
