"""Runs batches on one device: forward pass, prompt log-probabilities, sampling. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.errors import NotFound, RequestFailed
from tureen.jail.pool import Jail
from tureen.lora.adapter import Adapter, read_adapter
from tureen.models.config import ModelConfig
from tureen.runner.base import NAN_LOGITS, NOTHING_TO_DRAW, Batch, Capacity, Row, RowOutput, StepOutput
from tureen.runner.encoder import Encoder
from tureen.sampling.arithmetic import Arithmetic, Logits, Peaks
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.sampler import Sampler, outputs_of
from tureen.types import MediaItem, PositionLogprobs

SCORE_LOGITS = 1 << 22  # most logits computed at once for prompt log-probabilities
NOTHING = RowOutput()


class Forward(Protocol):
    """A model on a device. Tokens of a step stand one after another, in the order of its rows."""

    dtype: str
    device_name: str

    def run(self, batch: Batch) -> None:
        """Compute and store K/V of all rows, and the logits of those that sample."""

    def best(self) -> list[int]:
        """Of each row that sampled the token that `Arithmetic.greedy` gives it without a mask."""

    def sampled(self) -> tuple[Logits, Peaks]:
        """The logits [rows that sample, vocab] of the last step. They hold until the next call of `run` or `logits`."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Of tokens of the last step: [tokens, vocab]; they hold until the next call."""

    def last_hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Of tokens of the last step, after the final norm: [tokens, hidden_size]."""

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Rows may name it by its number from now on. Raises InvalidRequest when it cannot be used here."""

    def unload_adapter(self, number: int) -> None: ...

    def are_finite(self, logits: Logits) -> bool: ...

    def keep(self, logits: Logits) -> Logits:
        """A copy that outlives the next call."""


class ModelRunner:
    """A model with its KV pool and sampler on one device."""

    def __init__(self, forward: Forward, sampler: Sampler, capacity: Capacity, model: ModelConfig) -> None:
        self._forward = forward
        self._sampler = sampler
        self._capacity = capacity
        self.encoder: Encoder | None = None  # where the model sees
        self._model = model
        self._operations: dict[str, Callable[..., object]] = {
            "device": self._describe_device,
            "load_adapter": self._load_adapter,
            "unload_adapter": forward.unload_adapter,
        }

    @property
    def forward(self) -> Forward:
        return self._forward

    def run(self, batch: Batch) -> StepOutput:
        """One forward pass and sampling. The sampler hears of the batch only once the forward pass has succeeded."""
        if batch.rows:
            self._forward.run(batch)
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
            logits, peaks = self._forward.sampled()
            held = self._forward.keep(logits), peaks
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
        """What the rows that sample draw; from the logits of the last step, or those `held` since."""
        rows = [row for row in batch.rows if row.sample]
        slots = [row.slot for row in rows]
        if not rows:
            return []
        if held is None and batch.masks is None and self._sampler.plain.issuperset(slots):
            return outputs_of(self._forward.best())
        masks = batch.masks.wait() if batch.masks else {}
        logits, peaks = held or self._forward.sampled()
        positions = [row.start + len(row.token_ids) for row in rows]
        return self._sampler.sample(logits, slots, positions, masks, peaks)

    def _score(self, row: Row, first: int) -> tuple[PositionLogprobs, ...] | None:
        """Log-probabilities of the row's score targets, computed in pieces; None when its logits are not numbers."""
        size = max(1, SCORE_LOGITS // self._capacity.vocab_size)
        scores: list[PositionLogprobs] = []
        for begin in range(0, len(row.score_targets), size):
            targets = row.score_targets[begin : begin + size]
            at = first + row.score_from + begin
            logits = self._forward.logits(range(at, at + len(targets)))
            if not self._forward.are_finite(logits):
                return None
            scores += self._sampler.score(logits, row.slot, targets)
        return tuple(scores)

    def _hidden_states(self, row: Row, first: int) -> tuple[bytes, ...] | None:
        """Of the positions that the row asks for; None where they are not numbers."""
        if row.hidden_from is None:
            return ()
        states = self._forward.last_hidden(range(first + row.hidden_from, first + len(row.token_ids)))
        return tuple(state.tobytes() for state in states) if bool(np.isfinite(states).all()) else None

    def _load_adapter(self, number: int, path: str) -> None:
        """Raises InvalidRequest."""
        self._forward.load_adapter(number, read_adapter(path, self._model))

    def _describe_device(self) -> dict[str, str]:
        return {"name": self._forward.device_name, "dtype": self._forward.dtype}


def make_sampler(config: Config, vocab_size: int, arithmetic: Arithmetic) -> Sampler:
    """Raises StartupError for a --logit-processor that cannot be loaded."""
    registered = load_registered(config.logit_processor)
    jail = Jail(config.max_running_requests, vocab_size) if config.enable_custom_logit_processor else None
    return Sampler(config.max_running_requests, vocab_size, arithmetic, CustomProcessors(registered, jail))


def _spread(rows: Sequence[Row], drawn: list[RowOutput]) -> tuple[RowOutput, ...]:
    """What was drawn, to the rows that sample."""
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
