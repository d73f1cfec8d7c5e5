"""Which request kills engines is found, whichever it is; no other one is ever blamed; all get their turn."""

from __future__ import annotations

import random

import pytest

from tureen.serving.crash_bisection import POISON_AFTER, Trials


class World:
    """Engines that die with a poison among their requests, once it has brought `period` tokens in one life."""

    def __init__(self, num_requests, poisons, *, period=0, num_tokens=200):
        self.trials = Trials()
        self.left = {f"r{i}": num_tokens for i in range(num_requests)}
        self.poisons = {f"r{i}" for i in poisons}
        self.period = period
        self.blamed = []
        self.num_deaths = 0
        self.most_together = 0

    def live_once(self):
        """An engine's life: until a poison kills it, or nobody is left."""
        submitted, age = set(), {}
        while self.left:
            submitted |= {one for one in self.left if self.trials.may_run(one)}
            assert submitted, "somebody waits, and nobody runs"
            self.most_together = max(self.most_together, len(submitted))
            for one in sorted(submitted):
                age[one] = age.get(one, -1) + 1
                if one in self.poisons and age[one] >= self.period:
                    return self.die(submitted)
            for one in sorted(submitted):
                self.left[one] -= 1
                self.trials.survived(one, 1)
                if not self.left[one]:
                    submitted.discard(one)
                    del self.left[one]
                    self.trials.ended(one)
        return None

    def die(self, suspects):
        self.num_deaths += 1
        blamed = self.trials.died(sorted(suspects))
        if blamed is not None:
            self.blamed.append(blamed)
            del self.left[blamed]
            self.trials.ended(blamed)

    def run(self, limit=200):
        while self.left:
            self.live_once()
            assert self.num_deaths < limit
        return self


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 33])
def test_the_one_poison_is_found_wherever_it_stands_and_the_others_end_well(num_requests):
    for place in range(num_requests):
        world = World(num_requests, [place]).run()
        assert world.blamed == [f"r{place}"]
        assert world.num_deaths <= POISON_AFTER + 2 * num_requests.bit_length()


def test_a_request_alone_dies_three_times():
    assert World(1, [0]).run().num_deaths == POISON_AFTER


@pytest.mark.parametrize("period", [1, 3, 10, 40])
def test_a_request_that_kills_only_after_some_tokens_is_found_too(period):
    world = World(8, [5], period=period, num_tokens=5000).run()
    assert world.blamed == ["r5"]
    assert world.num_deaths <= 20


@pytest.mark.parametrize("seed", range(50))
def test_several_poisons_are_found_and_nobody_else(seed):
    dice = random.Random(seed)
    num_requests = dice.randint(2, 20)
    poisons = dice.sample(range(num_requests), dice.randint(1, min(4, num_requests)))
    world = World(num_requests, poisons, period=dice.choice([0, 0, 2])).run()
    assert sorted(world.blamed) == sorted(world.poisons)


@pytest.mark.parametrize("seed", range(20))
def test_deaths_that_are_nobody_s_fault_blame_nobody_while_outputs_grow(seed):
    dice = random.Random(seed)
    world = World(8, [], num_tokens=10_000)
    for _ in range(12):
        running = [one for one in world.left if world.trials.may_run(one)]
        for _ in range(4**12 if len(running) < 8 else 0):  # until the trials are over
            for one in running:
                world.trials.survived(one, 4**12)
            running = [one for one in world.left if world.trials.may_run(one)]
            if len(running) == 8:
                break
        dice.shuffle(running)
        world.die(running)
    assert world.blamed == []


def test_after_one_death_all_run_and_after_a_second_half_of_them():
    trials, ids = Trials(), ["a", "b", "c", "d"]
    assert trials.died(ids) is None
    assert all(map(trials.may_run, ids))
    trials.died(ids)
    assert list(map(trials.may_run, ids)) == [True, True, False, False]
    assert trials.may_run("new")
    assert not trials.survived("a", 1)
    assert trials.survived("b", 1)
    assert list(map(trials.may_run, ids)) == [True, True, True, False]


def test_what_has_ended_is_forgotten():
    world = World(8, [2, 3]).run()
    trials = world.trials
    assert (trials.deaths, trials._tried, [one for group in trials._held for one in group]) == ({}, {}, [])
    assert trials.may_run("anybody")
