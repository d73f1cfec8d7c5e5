"""Frozen is not dead: what a process could have done decides, told by made-up clocks."""

from __future__ import annotations

import pytest

from tureen.sandbox.heartbeat import Patience, Pulse

PATIENCE = Patience(suspect_s=0.5, stopped_s=1.0, cpu_s=5.0, idle_s=30.0)


def verdicts(looks, patience=PATIENCE):
    """looks: (seconds, processor seconds, is stopped) after the question was asked at 100 s with 7 s."""
    pulse = Pulse(patience)
    pulse.ask(100.0, 7.0)
    return [pulse.judge(100.0 + at_s, 7.0 + cpu_s, is_stopped=stopped) for at_s, cpu_s, stopped in looks]


def every(seconds, count, *, cpu=0.0, stopped=False):
    """Looks at this distance; `cpu`: the share of the time that the process computed."""
    return [(seconds * at, seconds * at * cpu, stopped) for at in range(1, count + 1)]


def test_nobody_who_was_not_asked_is_suspect():
    pulse = Pulse(PATIENCE)
    assert pulse.judge(0.0, 0.0, is_stopped=True) == "well"
    pulse.ask(1.0, 0.0)
    pulse.answer()
    assert pulse.judge(1000.0, 1000.0, is_stopped=True) == "well"


def test_one_that_computes_is_suspect_then_hung_by_its_own_clock():
    found = verdicts(every(1.0, 12, cpu=0.5))  # the machine gives it half of a processor
    assert found == ["suspect"] * 9 + ["hung"] * 3


def test_a_busy_machine_is_not_its_fault():
    assert verdicts(every(1.0, 29, cpu=0.1)) == ["suspect"] * 29


def test_one_that_is_stopped_is_hung_after_a_second():
    assert verdicts(every(0.25, 6, stopped=True)) == ["well", "suspect", "suspect", "suspect", "hung", "hung"]


def test_one_that_was_stopped_and_goes_on_is_not():
    looks = [(0.25, 0.0, True), (1.0, 0.0, True), (1.2, 0.0, False), (1.5, 0.0, True), (2.3, 0.0, True)]
    assert verdicts(looks) == ["well", "suspect", "suspect", "suspect", "suspect"]


def test_where_the_caller_slept_the_time_does_not_count():
    looks = [(0.25, 0.0, False), (500.0, 0.0, False), (500.2, 0.0, False), (501.0, 0.0, False)]
    assert verdicts(looks) == ["well", "well", "well", "suspect"]


def test_one_that_neither_computes_nor_answers_is_given_up_at_last():
    found = verdicts(every(1.0, 31))
    assert found[:29] == ["suspect"] * 29
    assert found[29:] == ["hung"] * 2


@pytest.mark.parametrize("field", ["stopped_s", "cpu_s", "idle_s"])
def test_each_limit_counts_alone(field):
    patient = Patience(suspect_s=0.5, stopped_s=1e9, cpu_s=1e9, idle_s=1e9)
    looks = every(1.0, 3, cpu=1.0, stopped=True)
    assert verdicts(looks, patient) == ["suspect"] * 3
    assert verdicts(looks, patient._replace(**{field: 1.0}))[-1] == "hung"
