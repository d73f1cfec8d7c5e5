"""Judges whether an engine is well by what it could have done: one that is frozen, or gets no processor, does not
hang."""

from __future__ import annotations

import contextlib
import time
from typing import Literal, NamedTuple

ANSWER_S = 1.5
"""Seconds of silence, without computing meanwhile, after which an engine is suspect."""

IDLE_SHARE = 0.05
"""The share of one processor below which an engine waits for something, and a faster machine would not help."""


class Sign(NamedTuple):
    """The signs of life of an engine."""

    has_answered: bool  # since the last sign
    processor_s: float  # that it has taken since it began
    is_stopped: bool = False  # by a signal, or a debugger


class EngineVerdict(NamedTuple):
    """`suspect`: the engine may come back; `frozen`: it did not within its time; `hung`: it will not."""

    state: Literal["well", "suspect", "frozen", "hung"]
    reason: str = ""


WELL = EngineVerdict("well")


class Watchdog:
    """Judges one engine after the other. It has no clock of its own."""

    def __init__(self, timeout_s: float, grace_s: float) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self.begin(Sign(has_answered=True, processor_s=0.0))

    @property
    def grace_left_s(self) -> float:
        """Seconds until a silent engine is given up as frozen."""
        return max(0.0, self._grace_s - self._silent_s)

    def begin(self, sign: Sign) -> None:
        """Watches another engine from now on. sign: its first signs of life."""
        self._processor_s = sign.processor_s
        self._silent_s = 0.0  # for how long it neither answered nor computed
        self._stuck_s = 0.0  # of the time it could use, for how long nothing came of it
        self._num_reports = -1

    def judge(self, sign: Sign, seconds: float, *, is_waiting: bool, num_reports: int) -> EngineVerdict:
        """Judges the engine after `seconds` in which this process ran.

        is_waiting: whether somebody waits for the engine. num_reports: how many reports have come in all.
        """
        used_s = sign.processor_s - self._processor_s
        self._processor_s = sign.processor_s
        is_answering = sign.has_answered and not sign.is_stopped
        if is_answering:
            self._silent_s = 0.0
            could_s = used_s if IDLE_SHARE * seconds < used_s < seconds else seconds
        else:
            self._silent_s += max(0.0, seconds - used_s)
            could_s = min(seconds, used_s)
        if num_reports != self._num_reports or not is_waiting:
            self._num_reports, could_s, self._stuck_s = num_reports, 0.0, 0.0
        self._stuck_s += could_s
        if self._stuck_s > self._timeout_s:
            return EngineVerdict("hung", f"no step ended within {self._timeout_s:g} s")
        if is_answering or not (sign.is_stopped or self._silent_s > ANSWER_S):
            return WELL
        reason = "its process is stopped" if sign.is_stopped else "its process gets no CPU"
        if self._silent_s > self._grace_s:
            return EngineVerdict("frozen", f"{reason}, for more than {self._grace_s:g} s")
        return EngineVerdict("suspect", reason)


def processor_s(task_id: int, *, is_thread: bool = False) -> float:
    """Returns the processor time that a process, or one thread, has taken, in seconds, by the clock of
    clock_getcpuclockid(3)."""
    with contextlib.suppress(OSError):  # it has ended
        return time.clock_gettime(~task_id << 3 | (6 if is_thread else 2))
    return 0.0
