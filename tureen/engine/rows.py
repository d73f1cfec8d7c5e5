"""Runs a step's rows. If the runner raises, runs each row alone, so that only faulty rows fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tureen.cache.manager import CacheManager
from tureen.contract.runner import Batch, Row, RowError, RowOutput, Runner, SlotState
from tureen.engine.constraint import too_complex
from tureen.engine.grammars import Grammars
from tureen.engine.guessing import Guesser
from tureen.engine.scheduler import StepPlan
from tureen.engine.sequence import Sequence
from tureen.errors import RequestFailed
from tureen.grammar_service.masks import PendingMasks
from tureen.log import get_logger

if TYPE_CHECKING:
    from tureen.engine.pacing import Pacer

MAX_FAILED_STEPS = 3
STEP_FAILED = RowError("request_failed")

log = get_logger("engine")


class RowRunner:
    """Runs step plans, with the masks of the rows that have a grammar."""

    def __init__(self, runner: Runner, grammars: Grammars, cache: CacheManager) -> None:
        self._runner = runner
        self._grammars = grammars
        self._cache = cache
        self._num_failed_steps = 0  # in a row
        self.guesser: Guesser | None = None  # runs each step, to measure it
        self.pacer: Pacer | None = None  # the same

    def run(self, plan: StepPlan) -> tuple[RowOutput, ...]:
        """Runs a step. Returns the output of each row. Raises RequestFailed if the runner seems to be permanently
        broken."""
        try:
            outputs = self._guessed(plan) if self.pacer is None else self.pacer.run(plan, self._guessed)
        except Exception as error:  # noqa: BLE001 - whatever the runner raises ends requests, not the engine
            log.warning(
                "a step of %d rows failed (%s); running them one at a time", len(plan.rows), type(error).__name__
            )
        else:
            self._num_failed_steps = 0
            return outputs
        outputs = tuple(
            self._run_alone(sequence, row, [state for state in plan.new_slots if state.slot == row.slot])
            for sequence, row in zip(plan.sequences, plan.rows, strict=True)
        )
        all_failed = all(output.error == STEP_FAILED for output in outputs)
        self._num_failed_steps = self._num_failed_steps + 1 if all_failed else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS and not self._can_compute():
            raise RequestFailed(f"every row failed in {MAX_FAILED_STEPS} consecutive steps", code="engine_dead")
        return outputs

    def clear(self) -> None:
        """Drops the recent outputs that guesses come from."""
        if self.guesser is not None:
            self.guesser.clear()

    def close(self) -> None:
        """Closes the tier of stored pages, then the runner and the draft model."""
        if self._cache.tier is not None:
            self._cache.tier.close()
        self._grammars.close()
        try:
            self._runner.close()
        finally:
            if self.guesser is not None:
                self.guesser.close()

    def _can_compute(self) -> bool:
        """Returns whether the runner can compute a token of our own; True if no page is free for this test."""
        table = self._cache.open(("", ""), [], 1, headroom=0, first_step=1, is_public=False)
        if table is None:
            return True
        try:
            capacity = self._runner.capacity()
            state = 2 * capacity.max_rows if capacity.num_states else -1  # belongs to no sequence
            window_pages = table.live.pages
            row = Row(0, (0,), start=0, pages=table.pages, sample=False, state_to=state, window_pages=window_pages)
            self._runner.submit(Batch((row,))).result()
        except Exception:
            log.exception("the runner fails for every row")
            return False
        finally:
            self._cache.close(table)
        return True

    def _guessed(self, plan: StepPlan) -> tuple[RowOutput, ...]:
        return self._run(plan) if self.guesser is None else self.guesser.run(plan, self._run)

    def _run(self, plan: StepPlan) -> tuple[RowOutput, ...]:
        masks = None
        if any(sequence.constraint is not None for sequence in plan.sequences):
            masks = self._grammars.fill_masks(plan.sequences, plan.rows)
        try:
            outputs = self._runner.submit(Batch(tuple(plan.rows), tuple(plan.new_slots)), masks).result().rows
        finally:
            if masks is not None:
                masks.wait()  # no grammar may change while the thread reads it
        return outputs if masks is None else _explained(outputs, plan, masks)

    def _run_alone(self, sequence: Sequence, row: Row, new_slots: list[SlotState]) -> RowOutput:
        try:
            return self._run(StepPlan([sequence], [row], new_slots))[0]
        except Exception:  # only the request of this row fails
            log.exception("request %s failed", sequence.request.id)
            return RowOutput(error=STEP_FAILED)


def _explained(outputs: tuple[RowOutput, ...], plan: StepPlan, masks: PendingMasks) -> tuple[RowOutput, ...]:
    """Returns the outputs, with an error in place of each whose mask could not be computed."""
    if not masks.failures:
        return outputs
    return tuple(
        RowOutput(error=_too_complex(sequence, masks.failures)) if sequence.slot in masks.failures else output
        for sequence, output in zip(plan.sequences, outputs, strict=True)
    )


def _too_complex(sequence: Sequence, failures: Mapping[int, str]) -> RowError:
    return RowError.of(too_complex(sequence.request.grammar_field, failures[sequence.slot]))
