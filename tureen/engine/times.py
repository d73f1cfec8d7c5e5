"""Records when steps compute tokens of a traced request. No decision depends on these times."""

from __future__ import annotations

import time

from tureen.contract.types import StepTimes, Timeline

MOST_STEPS = 32
"""Maximum number of steps of one request that are recorded individually; the others are counted."""


class RequestTimes:
    """The times of one request so far, in nanoseconds since 1970."""

    def __init__(self) -> None:
        self._received_ns = time.time_ns()
        self._compiled_ns = 0
        self._drawn_ns = 0
        self._step_ns = 0  # when the latest step began
        self._num_steps = 0
        self._steps: list[StepTimes] = []

    def note_compiled(self) -> None:
        """Records that the request's grammar is ready."""
        self._compiled_ns = time.time_ns()

    def begin_step(self) -> None:
        """Records that a step with tokens of the request is planned."""
        self._step_ns = time.time_ns()

    def end_step(self, num_tokens: int, *, has_drawn: bool) -> None:
        """Records the number of tokens of the request that the step computed."""
        ended_ns = time.time_ns()
        self._num_steps += 1
        if has_drawn and not self._drawn_ns:
            self._drawn_ns = ended_ns
        if len(self._steps) < MOST_STEPS:
            self._steps.append(StepTimes(self._step_ns, ended_ns, num_tokens))

    def end(self) -> Timeline:
        """Returns the times of the request, which ends now."""
        steps = tuple(self._steps)
        return Timeline(self._received_ns, self._compiled_ns, self._drawn_ns, time.time_ns(), self._num_steps, steps)
