"""Judges by its answers whether a process still works. Time-outs count the time in which it could have run."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["well", "suspect", "hung"]


class Patience(NamedTuple):
    """The bounds on how long an answer may take."""

    suspect_s: float = 0.5
    stopped_s: float = 1.0  # that a process may be stopped for, beyond that
    cpu_s: float = 5.0  # that it may compute without an answer
    idle_s: float = 30.0  # that it may neither compute nor be stopped: it is starved, swapped out, or stuck


class Pulse:
    """Questions to one process, and when they were asked. The caller supplies the time, its own and the process's."""

    def __init__(self, patience: Patience, longest_turn_s: float = 2.0) -> None:
        self._patience = patience
        self._longest_turn_s = longest_turn_s
        self._asked_s: float | None = None
        self._asked_cpu_s = 0.0
        self._looked_s = 0.0
        self._stopped_since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        return self._asked_s is not None

    def ask(self, now_s: float, cpu_s: float) -> None:
        """Notes that a question was sent; cpu_s: processor time that the process has taken so far."""
        if self._asked_s is None:
            self._asked_s, self._asked_cpu_s, self._looked_s = now_s, cpu_s, now_s

    def answer(self) -> None:
        """Notes that the process has answered."""
        self._asked_s = self._stopped_since_s = None

    def judge(self, now_s: float, cpu_s: float, *, is_stopped: bool) -> Verdict:
        """Judges the process. To be called at least once in `longest_turn_s`: after a longer gap the caller itself did
        not run."""
        if self._asked_s is None:
            return "well"
        if now_s - self._looked_s > self._longest_turn_s:
            self._asked_s += now_s - self._looked_s
            self._stopped_since_s = None
        self._looked_s = now_s
        if not is_stopped:
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        has_stopped = self._stopped_since_s is not None and now_s - self._stopped_since_s >= self._patience.stopped_s
        waited_s = now_s - self._asked_s
        if has_stopped or cpu_s - self._asked_cpu_s >= self._patience.cpu_s or waited_s >= self._patience.idle_s:
            return "hung"
        return "suspect" if waited_s >= self._patience.suspect_s else "well"
