"""A goal for the time between tokens limits the prompt tokens of a step, and changes no token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from world import World, make_request

from tureen.contract.runner import Row
from tureen.engine.pacing import LEAST_TOKENS, Pacer
from tureen.engine.scheduler import StepPlan

GOAL_S = 1.0
STREAM = SimpleNamespace(num_needed=9, num_computed=8)


class Machine:
    """A world whose steps take a time by their tokens, on a clock of its own."""

    def __init__(self, plain_s=0.2, token_s=0.01, goal_s=GOAL_S, **options):
        self.world = World(token_budget=200, num_pages=1000, **options)
        self.now_s = 0.0
        self.gaps_s = []  # of steps in which a stream got a token
        self.num_tokens = []  # of each step
        pacer = self.world.engine.rows.pacer = Pacer(goal_s, 200, clock=lambda: self.now_s)
        self.world.engine.scheduler.token_budget = pacer.token_budget
        submit = self.world.runner.submit

        def timed(batch, *others):
            known = [row.num_known for row in batch.rows]
            seconds = plain_s + token_s * sum(known)
            self.now_s += seconds
            self.num_tokens.append(sum(known))
            if 1 in known:
                self.gaps_s.append(seconds)
            return submit(batch, *others)

        self.world.runner.submit = timed

    def serve(self, *prompts):
        """A stream, and then prompts of these numbers of tokens one after the other."""
        self.world.add(make_request("stream", max_new_tokens=400, ignore_eos=True))
        for _ in range(10):
            self.world.step()
        for index, length in enumerate(prompts):
            self.world.add(make_request(f"p{index}", (1,) * length, max_new_tokens=1))
            while self.world.answers[f"p{index}"].finish is None:
                self.world.step()
        self.world.drain()
        self.world.check_answers()


@pytest.mark.parametrize(("plain_s", "token_s"), [(0.2, 0.01), (0.01, 0.02), (0.7, 0.003)])
def test_the_gaps_of_a_stream_keep_the_goal_beside_prompts_and_nearly_use_it(plain_s, token_s):
    machine = Machine(plain_s, token_s)
    machine.serve(70, 400, 1500)
    assert max(machine.gaps_s) <= 1.1 * GOAL_S
    beside_prompts = sorted(gap for gap in machine.gaps_s if gap > plain_s + 2 * token_s)
    assert beside_prompts[len(beside_prompts) // 2] > 0.8 * min(GOAL_S, plain_s + 200 * token_s)


def test_without_a_stream_prompts_take_the_whole_budget():
    machine = Machine()
    machine.world.add(make_request("p", (1,) * 400, max_new_tokens=1))
    machine.world.drain()
    assert machine.num_tokens[0] == 200


def test_a_goal_that_cannot_be_met_leaves_prompts_the_least_number_of_tokens():
    machine = Machine(plain_s=2.0)
    machine.serve(400)
    assert max(machine.num_tokens) == 1 + LEAST_TOKENS


def test_one_delayed_step_hardly_changes_the_limit():
    now = SimpleNamespace(s=0.0)
    pacer = Pacer(GOAL_S, 1000, clock=lambda: now.s)

    def step(num_known, seconds):
        rows = [Row(0, (1,), 0, (), True), Row(1, (1,) * num_known, 0, (), True)]

        def run(plan):
            now.s += seconds
            return ()

        pacer.run(StepPlan([], rows, []), run)

    step(1, 0.1)
    for _ in range(20):
        step(50, 0.6)
    before = pacer.token_budget([STREAM])
    step(50, 30.0)
    assert pacer.token_budget([STREAM]) > 0.55 * before
    for _ in range(10):
        step(50, 0.6)
    assert pacer.token_budget([STREAM]) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_a_goal_changes_no_token(seed):
    rng = random.Random(seed)
    requests = [
        make_request(
            f"r{index}",
            tuple(rng.randrange(8) for _ in range(rng.randrange(1, 120))),
            max_new_tokens=rng.randrange(1, 40),
        )
        for index in range(6)
    ]
    tokens = []
    for machine in (Machine(goal_s=100.0), Machine(goal_s=0.3)):
        for request in requests:
            machine.world.add(request)
            machine.world.step()
        machine.world.drain()
        tokens.append({name: answer.token_ids for name, answer in machine.world.answers.items()})
    assert tokens[0] == tokens[1]
