"""Limits the tokens of a step so that running streams get their next token in time: --itl-goal-ms.

The time of a step is predicted as that of a step of the same streams alone, plus a time for each further token. Both
are measured. Limits change no token, only the steps in which prompts are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tureen.contract.runner import RowOutput
from tureen.engine.guessing import bucket
from tureen.engine.scheduler import StepPlan
from tureen.engine.sequence import Sequence

LEAST_TOKENS = 16
"""Tokens that a step computes in addition to those of streams, even if it misses the goal: prompts always progress."""
RATE = 0.2  # by which older measurements count less with each new one
MOST_TIMES = 4.0  # a step that took longer than this multiple of its prediction was delayed by something else


class Pacer:
    """Measures steps, and predicts how many tokens fit into one."""

    def __init__(self, goal_s: float, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`goal_s`: maximum time of a step in which a stream gets a token. `most`: maximum tokens of any step."""
        self._goal_s = goal_s
        self._most = most
        self._clock = clock
        self._streams_s: dict[int, float] = {}  # of a step that computes one token a row, by the bucket of its rows
        self._further_s, self._further = 0.0, 0.0  # time of further tokens, and their number, in recent steps

    def token_budget(self, running: list[Sequence]) -> int:
        """Return how many tokens a step over the running sequences may compute."""
        num_streams = sum(sequence.num_needed - sequence.num_computed == 1 for sequence in running)
        if not num_streams:
            return self._most
        further = LEAST_TOKENS
        if self._further_s:
            left_s = self._goal_s - self._streams_s.get(bucket(num_streams), 0.0)
            further = max(int(left_s * self._further / self._further_s), LEAST_TOKENS)
        return min(self._most, num_streams + further)

    def run(self, plan: StepPlan, run: Callable[[StepPlan], tuple[RowOutput, ...]]) -> tuple[RowOutput, ...]:
        """Run a step, and record its time."""
        start_s = self._clock()
        outputs = run(plan)
        if not any(row.num_drafts for row in plan.rows):
            num_streams = sum(row.sample and row.num_known == 1 for row in plan.rows)
            further = sum(row.num_known for row in plan.rows) - num_streams
            self._learn(bucket(num_streams), further, self._clock() - start_s)
        return outputs

    def _learn(self, streams: int, further: int, seconds: float) -> None:
        known_s = self._streams_s.get(streams, 0.0)
        if not further:
            most_s = MOST_TIMES * known_s if known_s else seconds
            self._streams_s[streams] = known_s + (RATE if known_s else 1.0) * (min(seconds, most_s) - known_s)
            return
        further_s = max(seconds - known_s, 0.0)
        if self._further_s:
            further_s = min(further_s, MOST_TIMES * further * self._further_s / self._further)
        self._further_s += further_s - RATE * self._further_s
        self._further += further - RATE * self._further
