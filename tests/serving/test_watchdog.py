"""What counts as hung, frozen or well, by scripted signs: no clock runs here."""

from __future__ import annotations

import pytest

from tureen.serving.watchdog import ANSWER_S, Sign, Watchdog

TICK_S = 0.4
TIMEOUT_S, GRACE_S = 10.0, 5.0


class World:
    """A watchdog, and one engine that is seen every tick."""

    def __init__(self):
        self.dog = Watchdog(TIMEOUT_S, GRACE_S)
        self.processor_s = 0.0
        self.dog.begin(Sign(True, 0.0))
        self.num_reports = 0

    def tick(self, *, answers=True, used=0.0, stopped=False, waiting=True, reports=0, seconds=TICK_S):
        self.processor_s += used * seconds
        self.num_reports += reports
        sign = Sign(answers, self.processor_s, stopped)
        return self.dog.judge(sign, seconds, is_waiting=waiting, num_reports=self.num_reports)

    def ticks(self, seconds, **how):
        """The last verdict of so many seconds, or the first that is final."""
        for _ in range(round(seconds / TICK_S)):
            verdict = self.tick(**how)
            if verdict.state in ("hung", "frozen"):
                break
        return verdict


def test_who_computes_reports_and_answers_is_well_for_ever():
    assert World().ticks(1000, used=1.0, reports=1) == ("well", "")


def test_who_is_idle_and_nobody_waits_is_well_for_ever():
    assert World().ticks(1000, waiting=False).state == "well"


def test_a_step_that_computes_and_never_ends_is_hung_after_the_timeout():
    world = World()
    assert world.ticks(TIMEOUT_S, used=1.0).state == "well"
    assert world.ticks(2 * TICK_S, used=1.0) == ("hung", "no step ended within 10 s")


def test_who_sits_with_work_and_does_nothing_is_hung_after_the_timeout():
    world = World()
    assert world.ticks(TIMEOUT_S, used=0.001).state == "well"
    assert world.ticks(2 * TICK_S, used=0.001).state == "hung"


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_on_a_busy_machine_the_timeout_counts_the_processor_time_that_it_got(share):
    world = World()
    assert world.ticks(0.95 * TIMEOUT_S / share, used=share).state == "well"
    assert world.ticks(0.1 * TIMEOUT_S / share + TICK_S, used=share).state == "hung"


def test_a_report_begins_the_timeout_again():
    world = World()
    for _ in range(10):
        assert world.ticks(0.9 * TIMEOUT_S, used=1.0).state == "well"
        world.tick(used=1.0, reports=1)


def test_a_stopped_process_is_suspect_at_once_and_well_as_soon_as_it_answers():
    world = World()
    assert world.tick(answers=True, stopped=True) == ("suspect", "its process is stopped")
    assert world.ticks(GRACE_S - 2 * TICK_S, answers=False, stopped=True).state == "suspect"
    assert world.tick(answers=False).state == "suspect"  # it goes on, and has not answered yet
    assert world.tick(answers=True).state == "well"
    assert world.ticks(GRACE_S - TICK_S, answers=False, stopped=True).state == "suspect"  # it has all its grace again


def test_a_stopped_process_is_frozen_after_its_grace_and_never_hung():
    world = World()
    assert world.ticks(GRACE_S, answers=False, stopped=True).state == "suspect"
    verdict = world.ticks(2 * TICK_S, answers=False, stopped=True)
    assert verdict == ("frozen", "its process is stopped, for more than 5 s")


def test_a_process_that_gets_no_processor_is_suspect_then_frozen():
    world = World()
    assert world.ticks(ANSWER_S - TICK_S, answers=False).state == "well"
    assert world.tick(answers=False) == ("suspect", "its process gets no CPU")
    assert world.ticks(GRACE_S, answers=False).state == "frozen"


def test_a_process_that_computes_without_answering_is_not_frozen_but_hung_when_the_timeout_is_over():
    world = World()
    assert world.ticks(TIMEOUT_S - TICK_S, answers=False, used=1.0).state == "well"
    assert world.ticks(3 * TICK_S, answers=False, used=1.0).state == "hung"


def test_another_engine_is_not_judged_by_what_the_one_before_it_did():
    world = World()
    world.ticks(GRACE_S, answers=False, stopped=True)
    world.dog.begin(Sign(True, 0.0))
    world.processor_s = 0.0
    assert world.tick(answers=False, used=0.1).state == "well"
    assert world.dog.grace_left_s > GRACE_S - 2 * TICK_S
