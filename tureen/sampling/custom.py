"""The stage of custom logit processors: registered ones run here, those that clients sent as code in the jail."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tureen.errors import StartupError, echo
from tureen.jail.pool import Jail, JailError, Tracked
from tureen.logit_processor import BUILT_IN, CustomLogitProcessor
from tureen.runner.base import RowError, SlotState
from tureen.types import NO_TOKEN

FIELD = "custom_logit_processor"
FAILED, REJECTED = "custom_logit_processor_failed", "custom_logit_processor_rejected"


class CustomState:
    """What processors see of one sequence. `params` is the same dictionary at every step."""

    def __init__(self, state: SlotState, number: int) -> None:
        self.processor = state.processor
        prompt_ids = [token_id for token_id in state.prompt_ids if token_id != NO_TOKEN]
        given = state.params.custom_params or {}
        self.tracked = Tracked(number, given, prompt_ids, list(state.output_ids))
        request = SimpleNamespace(origin_input_ids=prompt_ids, output_ids=self.tracked.output_ids)
        self.params: dict[str, Any] = given | {"__req__": request}

    @property
    def is_code(self) -> bool:
        return self.processor.startswith("{")


class CustomProcessors:
    """Registered processors by name, and the jail where there is one."""

    def __init__(self, registered: Mapping[str, CustomLogitProcessor], jail: Jail | None = None) -> None:
        self._registered = registered
        self._jail = jail
        self._numbers = count()

    def start(self, state: SlotState) -> CustomState:
        """A sequence begins, or goes on after a preemption."""
        return CustomState(state, next(self._numbers))

    def drop(self, state: CustomState) -> None:
        """A sequence has ended."""
        if self._jail is not None and state.is_code:
            self._jail.drop(state.tracked.number)

    def apply(self, logits: Tensor, peaks: Tensor, states: Sequence[CustomState | None]) -> dict[int, RowError]:
        """Change those rows of logits [rows, vocabulary] float32 that have a state; the others are not touched.

        `peaks` [rows], the largest logit of each, is kept right. Rows with the same processor are one call. Returns the
        rows that failed, which stay as they were.
        """
        groups: dict[str, list[int]] = {}
        for row, state in enumerate(states):
            if state is not None:
                groups.setdefault(state.processor, []).append(row)
        members = {name: [state for row in rows if (state := states[row]) is not None] for name, rows in groups.items()}
        results: dict[str, Tensor | RowError] = {}
        in_jail = [name for name in groups if name.startswith("{")]
        if in_jail:
            batches = [
                (name, [logits[row] for row in groups[name]], [one.tracked for one in members[name]])
                for name in in_jail
            ]
            results |= dict(zip(in_jail, self._run_in_jail(batches), strict=True))
        for name in groups:
            if name not in results:
                results[name] = self._run_here(name, logits[groups[name]], members[name])
        failures: dict[int, RowError] = {}
        for name, rows in groups.items():
            failures |= _take_over(logits, peaks, rows, results[name])
        return failures

    def close(self) -> None:
        if self._jail is not None:
            self._jail.close()

    def _run_in_jail(self, batches: list[tuple[str, list[Tensor], list[Tracked]]]) -> list[Tensor | RowError]:
        if self._jail is None:
            return [RowError(REJECTED, "the server runs no code of clients", 400, FIELD)] * len(batches)
        return [
            _row_error(str(result), is_rejected=result.is_rejected) if isinstance(result, JailError) else result
            for result in self._jail.run(batches)
        ]

    def _run_here(self, name: str, logits: Tensor, states: list[CustomState]) -> Tensor | RowError:
        processor = self._registered.get(name)
        if processor is None:
            return RowError(REJECTED, f"there is no logit processor {echo(name)}", 400, FIELD)
        try:
            result = processor(logits, [state.params for state in states])
        except Exception as error:  # noqa: BLE001 - the operator's code fails its own requests only
            return _row_error(f"{type(error).__name__}: {echo(str(error))[1:-1]}")
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            return _row_error("it did not return a tensor of the shape it was given")
        return result.to(logits)


def _row_error(what: str, *, is_rejected: bool = False) -> RowError:
    if is_rejected:
        return RowError(REJECTED, f"{FIELD} was not accepted: {what}", 400, FIELD)
    return RowError(FAILED, f"{FIELD} failed: {what}", 500, FIELD)


def _take_over(logits: Tensor, peaks: Tensor, rows: list[int], result: Tensor | RowError) -> dict[int, RowError]:
    if isinstance(result, RowError):
        return dict.fromkeys(rows, result)
    failures: dict[int, RowError] = {}
    for row, changed, peak in zip(rows, result, result.amax(dim=1).tolist(), strict=True):
        if math.isfinite(peak):  # it is NaN where one is in the row
            logits[row].copy_(changed)
            peaks[row] = peak
        else:
            failures[row] = _row_error("it left no token that can be drawn, or a logit that is NaN or +infinity")
    return failures


def load_registered(entries: Sequence[str]) -> dict[str, CustomLogitProcessor]:
    """The built-in processors, and those that the operator names as NAME=MODULE:CLASS. Raises StartupError."""
    found = {name: _load("built-in", where) for name, where in BUILT_IN.items()}
    for entry in entries:
        name, _, where = entry.partition("=")
        if not name or name.startswith("{") or where.count(":") != 1:
            raise StartupError(f"--logit-processor {entry}: it must be NAME=MODULE:CLASS")
        if name in found:
            raise StartupError(f"--logit-processor {entry}: the name {echo(name)} is taken")
        found[name] = _load(f"--logit-processor {entry}", where)
    return found


def _load(flag: str, where: str) -> CustomLogitProcessor:
    module, _, name = where.partition(":")
    try:
        processor = getattr(importlib.import_module(module), name)()
    except Exception as error:  # noqa: BLE001 - whatever the operator's module raises
        raise StartupError(f"{flag}: cannot make it: {type(error).__name__}: {error}") from None
    if not callable(processor):
        raise StartupError(f"{flag}: its objects cannot be called")
    loaded: CustomLogitProcessor = processor
    return loaded
