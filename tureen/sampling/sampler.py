"""Draws tokens from logits: runs the stages of processors.py in their order, draws, and reports log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tureen.contract.runner import NAN_LOGITS, NOTHING_TO_DRAW, RowError, SlotState
from tureen.contract.types import Explanation, LogprobsMode, LogprobSpec, PositionLogprobs
from tureen.grammar import Mask
from tureen.sampling import logprobs, processors, random
from tureen.sampling.arithmetic import NOT_SOUND, NOTHING_ALLOWED, Arithmetic, Logits, Peaks, Softmaxes, Values
from tureen.sampling.custom import CustomProcessors
from tureen.sampling.explaining import GRAMMAR, PROCESSOR, Tracer
from tureen.sampling.filtered import draw_filtered
from tureen.sampling.processor_pool import ProcessorPool
from tureen.sampling.slots import Slot, start_slot
from tureen.sampling.support import Supports

SCORED_TOGETHER = 16  # prompt positions; bounds the float64 working memory
FAILURES = {NOT_SOUND: NAN_LOGITS, NOTHING_ALLOWED: NOTHING_TO_DRAW}
NO_LOGPROBS = LogprobSpec()
PROCESSED, OWN = ("processed", "both"), ("raw", "both")
"""The modes in which log-probabilities of the distribution that is drawn from, and of the model's own, are reported."""
NO_MASKS: Mapping[int, Mask] = {}


class Draw(NamedTuple):
    """The result of drawing from a row of logits: a token, or the reason why there is none."""

    token_id: int | None = None
    logprobs: PositionLogprobs | None = None  # if its request asked
    error: RowError | None = None
    explanation: Explanation | None = None  # if its request asked


class Sampler:
    """Draws the next token of each row of a batch. A row's result does not depend on the other rows.

    A failed row (NaN or +Inf among its logits, or no token that may be drawn) leaves its slot as it was, and so does a
    call that raises.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        arithmetic: Arithmetic,
        processors: CustomProcessors | None = None,
    ) -> None:
        self._custom = processors or CustomProcessors({})
        self._arithmetic = arithmetic
        self._vocab_size = vocab_size
        self._slots: list[Slot | None] = [None] * max_rows
        self.following: set[int] = set()  # slots that must hear of every token of their output
        self.explained: set[int] = set()  # slots whose tokens are explained
        self._supported: set[int] = set()  # slots that ask which tokens could be drawn
        self.plain: set[int] = set()  # slots that take the best token, and ask nothing else of their logits

    def set_slot(self, state: SlotState) -> None:
        """Gives a slot to a sequence. Nothing remains of the one that held it before."""
        held = self._slots[state.slot]
        if held is not None and held.custom is not None:
            self._custom.leave(held.custom)
        custom = self._custom.start(state) if state.processor else None
        slot = self._slots[state.slot] = start_slot(state, processors.stages_of(state.params), custom)
        shows_support = state.logprobs is not None and state.logprobs.support
        sets = (
            (self.following, slot.follows),
            (self.plain, slot.is_plain),
            (self.explained, state.explain),
            (self._supported, shows_support),
        )
        for slots, belongs in sets:
            if belongs:
                slots.add(state.slot)
            else:
                slots.discard(state.slot)

    def sample(
        self,
        logits: Logits,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
        peaks: Peaks | None = None,
    ) -> list[Draw]:
        """Draws one token per row of logits [rows, vocab] float32, which are overwritten.

        positions[i] is the absolute index, in its sequence, of the token being drawn for slots[i]. A slot that follows
        its tokens has one row; another may have several. masks: the tokens that a row's grammar allows, by row. peaks:
        those of the logits, if they are known. A failed row gets error NAN_LOGITS, or NOTHING_TO_DRAW.
        """
        if tuple(logits.shape) != (len(slots), self._vocab_size):
            raise ValueError(f"logits {tuple(logits.shape)} for {len(slots)} rows and {self._vocab_size} tokens")
        if not slots:
            return []
        logits = self._arithmetic.prepare(logits)
        batch = [self._slot(slot) for slot in slots]
        if self.plain.issuperset(slots):
            best = self._arithmetic.greedy(logits, [masks.get(row) for row in range(len(slots))] if masks else [])
            return [Draw(token) if token >= 0 else Draw(error=FAILURES[token]) for token in best]
        raw_rows = [row for row, slot in enumerate(batch) if _mode(slot) in OWN]
        raw = self._arithmetic.copy(logits, raw_rows) if raw_rows else None
        tracer = None
        if not self.explained.isdisjoint(slots):
            explained = [row for row, slot in enumerate(slots) if slot in self.explained]
            tracer = Tracer(self._arithmetic, logits, explained)
        peaks, failures = self._change(logits, peaks, slots, batch, positions, masks, tracer)
        good = [row for row in range(len(batch)) if row not in failures]
        supports = self._supports(slots) if self._supported else None
        tokens = self._draw(logits, peaks, batch, positions, good, tracer, supports)
        reports = self._reports(logits, peaks, batch, tokens)
        if raw is not None:
            specs = [_spec(batch[row]) for row in raw_rows]
            own = _own_logprobs(self._arithmetic, raw, [tokens.get(row, 0) for row in raw_rows], specs)
            reports |= {row: _joined(reports.get(row), position) for row, position in zip(raw_rows, own, strict=True)}
        if supports is not None:
            supports.add_to(reports, tokens)
        for row, token_id in tokens.items():
            if batch[row].follows:
                batch[row].record(token_id)
        why = {} if tracer is None else tracer.explain(peaks, batch, positions, tokens)
        return [
            Draw(error=failures[row])
            if row in failures
            else Draw(tokens[row], reports.get(row), explanation=why.get(row))
            for row in range(len(batch))
        ]

    def best(self, logits: Logits, row: int, mask: Mask) -> int:
        """Returns the token of a mask that has the largest logit, of the model's own; negative where there is none."""
        return self._arithmetic.greedy(self._arithmetic.copy(self._arithmetic.prepare(logits), [row]), [mask])[0]

    @property
    def processors(self) -> ProcessorPool | None:
        """The workers of client processors; None where clients may not send any."""
        return self._custom.pool

    def close(self) -> None:
        """Ends the processes of custom logit processors."""
        self._custom.close()

    def score(
        self, logits: Logits, slot: int, targets: Sequence[int], position: int
    ) -> tuple[PositionLogprobs, ...] | None:
        """Returns the log-probabilities of known tokens: log softmax, in nats, of the model's own logits
        [len(targets), vocab] at each target. `position`: that of the first target.

        Returns None where a row of logits holds NaN or +Inf, or -Inf alone.
        """
        spec = _spec(self._slot(slot))
        num_without = min(max(0, spec.entropy_start - position), len(targets))  # the first ones have no entropy
        without = msgspec.structs.replace(spec, entropy_start=-1)
        specs = [without] * num_without + [spec] * (len(targets) - num_without)
        positions: list[PositionLogprobs] = []
        for start in range(0, len(targets), SCORED_TOGETHER):
            part = slice(start, start + SCORED_TOGETHER)
            rows = self._arithmetic.prepare(logits[part])
            if not np.isfinite(self._arithmetic.peaks(rows).values).all():
                return None
            positions += _own_logprobs(self._arithmetic, rows, targets[part], specs[part])
        return tuple(positions)

    def catch_up(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Takes tokens at positions start, … of a sequence: its output may have grown by tokens that were not drawn
        here."""
        held = self._slots[slot]
        if held is not None:
            known = len(held.state.prompt_ids) + held.num_outputs
            for token_id in token_ids[max(0, known - start) :]:
                held.record(token_id)

    def _slot(self, slot: int) -> Slot:
        held = self._slots[slot]
        if held is None:
            raise LookupError(f"slot {slot} was never set")
        return held

    def _supports(self, slots: Sequence[int]) -> Supports:
        return Supports([row for row, slot in enumerate(slots) if slot in self._supported])

    def _change(
        self,
        logits: Logits,
        peaks: Peaks | None,
        slots: Sequence[int],
        batch: Sequence[Slot],
        positions: Sequence[int],
        masks: Mapping[int, Mask],
        tracer: Tracer | None,
    ) -> tuple[Peaks, dict[int, RowError]]:
        """Runs all stages before temperature. The rows that failed may have any logits then."""
        peaks = peaks or self._arithmetic.peaks(logits)
        sound = np.isfinite(peaks.values)
        num_outputs = [position - len(slot.state.prompt_ids) for slot, position in zip(batch, positions, strict=True)]
        failures: dict[int, RowError] = {}
        before = None if tracer is None else tracer.before
        if processors.run_logit_stages(self._arithmetic, logits, batch, num_outputs, before):
            peaks = self._arithmetic.peaks(logits)
            is_left = np.isfinite(peaks.values)  # all that stages can do to a sound row is to forbid everything
            failures = dict.fromkeys(np.flatnonzero(sound & ~is_left).tolist(), NOTHING_TO_DRAW)
        failures |= dict.fromkeys(np.flatnonzero(~sound).tolist(), NAN_LOGITS)
        if any(slot.custom is not None for slot in batch):
            states = [None if row in failures else slot.custom for row, slot in enumerate(batch)]
            if before is not None:
                before(PROCESSOR, {row: None for row, state in enumerate(states) if state is not None})
            failures |= self._custom.apply(self._arithmetic, logits, peaks, states)
        constrained = [row for row in masks if row not in failures]
        if constrained:
            if before is not None:
                before(GRAMMAR, dict.fromkeys(constrained))
            self._arithmetic.forbid(logits, peaks, constrained, [masks[row] for row in constrained])
            failures |= {row: NOTHING_TO_DRAW for row in constrained if peaks.values[row] == -math.inf}
        return peaks, failures

    def _draw(
        self,
        logits: Logits,
        peaks: Peaks,
        batch: Sequence[Slot],
        positions: Sequence[int],
        rows: Sequence[int],
        tracer: Tracer | None,
        supports: Supports | None,
    ) -> dict[int, int]:
        """Returns the token of each of `rows`."""
        drawing = [row for row in rows if not batch[row].params.is_greedy]
        tokens = {row: int(peaks.token_ids[row]) for row in rows if batch[row].params.is_greedy}
        cut = [row for row in drawing if processors.uses_cut(batch[row].params)]
        plain = [row for row in drawing if row not in cut] if cut else drawing
        for group in (plain, cut):
            if not group:
                continue
            params = [batch[row].params for row in group]
            softmaxes = _softmaxes(logits, peaks, group, processors.temperature(params))
            uniforms = random.uniform([batch[row].state.seed for row in group], [positions[row] for row in group])
            if group is cut:
                watch = None if tracer is None else tracer.watch(group, uniforms, params)
                watch = watch if supports is None else supports.watch(group, watch)
                drawn = draw_filtered(self._arithmetic, softmaxes, params, uniforms, watch)
            elif tracer is None:
                drawn = self._arithmetic.draw(softmaxes, uniforms)
            else:
                drawn = tracer.draw(softmaxes, uniforms)
            tokens |= zip(group, drawn.tolist(), strict=True)
        return tokens

    def _reports(
        self, logits: Logits, peaks: Peaks, batch: Sequence[Slot], tokens: Mapping[int, int]
    ) -> dict[int, PositionLogprobs]:
        """Returns log-probabilities of the distributions that tokens were drawn from, of the rows that ask for
        these."""
        asking = [row for row in sorted(tokens) if _mode(batch[row]) in PROCESSED]
        if not asking:
            return {}
        temperatures = processors.temperature([batch[row].params for row in asking])
        reports = logprobs.report(
            self._arithmetic,
            _softmaxes(logits, peaks, asking, temperatures),
            [tokens[row] for row in asking],
            [_spec(batch[row]) for row in asking],
        )
        return dict(zip(asking, reports, strict=True))


def _mode(slot: Slot) -> LogprobsMode | None:
    return None if slot.state.logprobs is None else slot.state.logprobs.mode


def _spec(slot: Slot) -> LogprobSpec:
    return slot.state.logprobs or NO_LOGPROBS


def _joined(processed: PositionLogprobs | None, own: PositionLogprobs) -> PositionLogprobs:
    return own if processed is None else msgspec.structs.replace(processed, raw=own)


def _softmaxes(logits: Logits, peaks: Peaks, rows: Sequence[int], temperatures: Values) -> Softmaxes:
    index = np.array(rows, dtype=np.int64)
    return Softmaxes(logits, index, peaks.values[index], temperatures)


def _own_logprobs(
    arithmetic: Arithmetic, logits: Logits, token_ids: Sequence[int], specs: Sequence[LogprobSpec]
) -> list[PositionLogprobs]:
    """Returns the log-probabilities under the model's own logits, for all rows."""
    rows = range(len(token_ids))
    softmaxes = _softmaxes(logits, arithmetic.peaks(logits), rows, np.ones(len(token_ids)))
    return logprobs.report(arithmetic, softmaxes, token_ids, specs)
