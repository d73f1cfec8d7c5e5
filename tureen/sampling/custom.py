"""The stage of custom logit processors: registered ones run here, those that clients sent as code in workers."""

from __future__ import annotations

import importlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tureen.contract.runner import RowError, SlotState
from tureen.contract.types import NO_TOKEN
from tureen.errors import InvalidRequest, StartupError, echo, excerpt
from tureen.extras import is_installed, require
from tureen.logit_processor import BUILT_IN, CustomLogitProcessor
from tureen.sampling import array_logits
from tureen.sampling.arithmetic import Arithmetic, Logits, Peaks
from tureen.sampling.processor_pool import (
    CALL_TIMEOUT_S,
    ProcessorBatch,
    ProcessorError,
    ProcessorPool,
    Raised,
    Tracked,
    WorkerKey,
    key_of,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Changed = NDArray[np.float32] | torch.Tensor

FIELD = "custom_logit_processor"
FAILED, REJECTED = "custom_logit_processor_failed", "custom_logit_processor_rejected"
MAX_LEFT = 64  # sequences without a slot that are remembered
Group = list[tuple[int, "CustomState"]]
"""Rows with the same processor."""


class Fault(NamedTuple):
    """The reason why a call of a processor gave nothing. `may_be_one_row`: the processor itself raised, maybe because
    of one row's parameters."""

    error: RowError
    may_be_one_row: bool = False


class CustomState:
    """The part of one sequence's state that processors see. `params` is the same dictionary at every step."""

    def __init__(self, state: SlotState, number: int) -> None:
        self.processor = state.processor
        self.seed = state.seed
        self.code = key_of(state.client, state.processor) if state.processor.startswith("{") else None  # None = a name
        self.prompt_ids = state.prompt_ids
        known = [token_id for token_id in state.prompt_ids if token_id != NO_TOKEN]
        client_params = state.params.processor_params
        self.tracked = Tracked(number, client_params, known, list(state.output_ids))
        request = SimpleNamespace(origin_input_ids=known, output_ids=self.tracked.output_ids)
        self.params: dict[str, Any] = client_params | {"__req__": request}

    @property
    def key(self) -> str | WorkerKey:
        """The name of a registered processor, or the key of the worker that runs a client's."""
        return self.code or self.processor

    def goes_on_as(self, state: SlotState) -> bool:
        """Says whether the sequence of this state is that of `state`, or cannot be told from it.

        Its output may have grown by tokens that were forced after the last that was drawn.
        """
        known = self.tracked.output_ids
        return (
            self.key == (key_of(state.client, state.processor) if self.code else state.processor)
            and self.seed == state.seed
            and self.prompt_ids == state.prompt_ids
            and self.tracked.params == state.params.processor_params
            and tuple(known) == state.output_ids[: len(known)]
        )


class CustomProcessors:
    """The registered processors by name, and the workers that run clients' processors, where these are allowed."""

    def __init__(self, registered: Mapping[str, CustomLogitProcessor], pool: ProcessorPool | None = None) -> None:
        self._registered = registered
        self.pool = pool
        self._numbers = count()
        self._left: deque[CustomState] = deque()  # out of their slots: ended, or preempted

    def start(self, state: SlotState) -> CustomState:
        """Returns the state of a sequence that begins, or that continues after a preemption with the dictionary it
        had."""
        going_on = [held for held in self._left if state.output_ids and held.goes_on_as(state)]
        if not going_on:
            return CustomState(state, next(self._numbers))
        held = max(going_on, key=lambda member: len(member.tracked.output_ids))
        self._left.remove(held)
        held.tracked.output_ids += state.output_ids[len(held.tracked.output_ids) :]
        return held

    def leave(self, state: CustomState) -> None:
        """Hears that a sequence has lost its slot: it has ended, or was preempted."""
        self._left.append(state)
        if len(self._left) > MAX_LEFT:
            oldest = self._left.popleft()
            if self.pool is not None and oldest.code is not None:
                self.pool.drop(oldest.code, oldest.tracked.number)

    def apply(
        self, arithmetic: Arithmetic, logits: Logits, peaks: Peaks, states: Sequence[CustomState | None]
    ) -> dict[int, RowError]:
        """Changes those rows of logits [rows, vocabulary] that have a state; the others are not touched.

        `peaks` are kept right. Rows with the same processor are one call. Where it raises, each row is called again by
        itself, so that only those at fault fail. Returns the rows that failed, which stay as they were.
        """
        groups: dict[str | WorkerKey, Group] = {}
        for row, state in enumerate(states):
            if state is not None:
                groups.setdefault(state.key, []).append((row, state))
        failures: dict[int, RowError] = {}
        alone: list[Group] = []
        results = self._run(arithmetic, logits, list(groups.values()))
        for group, result in zip(groups.values(), results, strict=True):
            if isinstance(result, Fault) and result.may_be_one_row and len(group) > 1:
                alone += [[member] for member in group]
            else:
                failures |= _take_over(arithmetic, logits, peaks, [row for row, _ in group], result)
        limit_s = time.monotonic() + CALL_TIMEOUT_S
        for group in alone:
            late = _fault(f"it did not return within {CALL_TIMEOUT_S:g} s")
            [result] = self._run(arithmetic, logits, [group]) if time.monotonic() < limit_s else [late]
            failures |= _take_over(arithmetic, logits, peaks, [row for row, _ in group], result)
        return failures

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def _run(self, arithmetic: Arithmetic, logits: Logits, groups: list[Group]) -> list[Changed | Fault]:
        """Returns the result of each group; those in workers run at the same time."""
        batches = [
            ProcessorBatch(
                code,
                [arithmetic.host_row(logits, row) for row, _ in group],
                [member.tracked for _, member in group],
            )
            for group in groups
            if (code := group[0][1].code) is not None
        ]
        elsewhere = iter(self._run_in_workers(batches) if batches else ())
        return [
            self._run_here(arithmetic, logits, group) if group[0][1].code is None else next(elsewhere)
            for group in groups
        ]

    def _run_in_workers(self, batches: list[ProcessorBatch]) -> Sequence[Changed | Fault]:
        if self.pool is None:
            return [Fault(RowError(REJECTED, "the server does not run clients' code", 400, FIELD))] * len(batches)
        return [
            _fault(str(result), is_rejected=result.is_rejected, may_be_one_row=isinstance(result, Raised))
            if isinstance(result, ProcessorError)
            else result
            for result in self.pool.run(batches)
        ]

    def _run_here(self, arithmetic: Arithmetic, logits: Logits, group: Group) -> Changed | Fault:
        name = group[0][1].processor
        processor = self._registered.get(name)
        if processor is None:
            return Fault(RowError(REJECTED, f"there is no logit processor {echo(name)}", 400, FIELD))
        places = [row for row, _ in group]
        if name in BUILT_IN:
            copied = arithmetic.copy(logits, places)
            if isinstance(copied, np.ndarray):  # torch, whose import takes seconds, is not needed
                return _called(processor, copied, group)
        if not is_installed("torch"):
            return _called(processor, array_logits.from_array(arithmetic.copy(logits, places)), group)
        import torch  # noqa: PLC0415 - `load_registered` has imported it, or computing has

        with torch.inference_mode():
            return _called(processor, arithmetic.tensor(logits, places), group)


def _called(processor: CustomLogitProcessor, rows: Any, group: Group) -> Changed | Fault:
    try:
        result: Any = processor(rows, [state.params for _, state in group])
    except InvalidRequest as error:
        return Fault(RowError(FAILED, error.message, error.status, error.field), may_be_one_row=True)
    except Exception as error:  # noqa: BLE001 - the operator's code fails its own requests only
        return _fault(f"{type(error).__name__}: {excerpt(str(error))}", may_be_one_row=True)
    kind = np.ndarray if isinstance(rows, np.ndarray) else type(rows)
    if not isinstance(result, kind) or result.shape != rows.shape:
        return _fault("it did not return a tensor of its input's shape")
    changed: Changed = result if isinstance(result, np.ndarray) else result.to(rows)
    return changed


def load_failed(error: ProcessorError) -> RowError:
    """Returns the error of a request whose code could not be loaded."""
    return _fault(str(error), is_rejected=error.is_rejected).error


def _fault(what: str, *, is_rejected: bool = False, may_be_one_row: bool = False) -> Fault:
    if is_rejected:
        return Fault(RowError(REJECTED, f"{FIELD} was not accepted: {what}", 400, FIELD))
    return Fault(RowError(FAILED, f"{FIELD} failed: {what}", 500, FIELD), may_be_one_row)


def _take_over(
    arithmetic: Arithmetic, logits: Logits, peaks: Peaks, rows: list[int], result: Changed | Fault
) -> dict[int, RowError]:
    if isinstance(result, Fault):
        return dict.fromkeys(rows, result.error)
    failures: dict[int, RowError] = {}
    changed = arithmetic.adopt(result)
    values, token_ids = arithmetic.peaks(changed)
    for place, row in enumerate(rows):
        if math.isfinite(values[place]):
            arithmetic.replace(logits, row, changed, place)
            peaks.values[row], peaks.token_ids[row] = values[place], token_ids[place]
        else:
            failures[row] = _fault("it left no token to sample, or a logit that is NaN or +infinity").error
    return failures


def load_registered(entries: Sequence[str]) -> dict[str, CustomLogitProcessor]:
    """Returns the built-in processors, and those that the operator names as NAME=MODULE:CLASS. Raises StartupError."""
    processors = {name: _load("built-in", where) for name, where in BUILT_IN.items()}
    for entry in entries:
        name, _, where = entry.partition("=")
        if not name or name.startswith("{") or where.count(":") != 1:
            raise StartupError(f"--logit-processor {entry}: it must be NAME=MODULE:CLASS")
        if name in processors:
            raise StartupError(f"--logit-processor {entry}: the name {echo(name)} is taken")
        processors[name] = _load(f"--logit-processor {entry}", where)
    if entries and is_installed("torch"):
        import torch  # noqa: F401, PLC0415 - what they are given; it takes seconds, in which no step may wait

    return processors


def _load(flag: str, where: str) -> CustomLogitProcessor:
    module, _, name = where.partition(":")
    try:
        processor = getattr(importlib.import_module(module), name)()
    except Exception as error:  # noqa: BLE001 - whatever the operator's module raises
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            require(flag, "torch")
        raise StartupError(f"{flag}: cannot make it: {type(error).__name__}: {error}") from None
    if not callable(processor):
        raise StartupError(f"{flag}: its objects are not callable")
    loaded: CustomLogitProcessor = processor
    return loaded
