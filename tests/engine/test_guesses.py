"""Guesses of what comes next change no answer, whoever makes them, and save steps where they are right."""

from __future__ import annotations

import random
from itertools import product

import pytest
from samples import some
from world import ADAPTERS, VOCAB_SIZE, World, expected, make_request, simulate


def prophet(rng, right):
    """Guesses what will be drawn; each token with probability `right`, else something else."""
    known = {}

    def guess(sequence, most):
        request = sequence.request
        if request.id not in known:
            known[request.id] = expected(request, 4096, ADAPTERS.index(request.adapter))[0]
        coming = known[request.id][sequence.num_output :][: rng.randrange(most + 1)]
        return tuple(token if rng.random() < right else rng.randrange(VOCAB_SIZE) for token in coming)

    return guess


PAGE_SIZES = (1, 2, 16)
RIGHT = (0.0, 0.6, 1.0)


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "right", "page_size"), some(product(range(20), RIGHT, PAGE_SIZES), 28))
def test_guesses_right_or_wrong_change_no_answer(seed, right, page_size):
    sizes = {"page_size": page_size, "window": seed % 2 * 9, "spare_tokens": 20}
    simulate(seed, drafter=prophet(random.Random(seed), right), **sizes).check_answers()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(20), 10))
def test_guesses_go_with_faults_aborts_and_lost_engines(seed):
    drafter = prophet(random.Random(seed), 0.8)
    world = simulate(seed, page_size=2, abort_rate=0.1, fault_rate=0.02, loss_rate=0.05, drafter=drafter)
    world.check_answers(may_fail=True)


def test_right_guesses_save_steps():
    def steps(drafter):
        world = World(drafter=drafter)
        world.add(make_request(max_new_tokens=30, ignore_eos=True))
        world.drain()
        world.check_answers()
        return world.num_steps

    assert steps(None) == 30
    right = random.Random(1)
    right.randrange = lambda most: most - 1
    assert steps(prophet(right, 1.0)) == 1


def test_guesses_take_only_what_the_budget_of_a_step_leaves():
    world = World(token_budget=3, drafter=lambda sequence, most: (0,) * 99)
    for index in range(2):
        world.add(make_request(f"r{index}", max_new_tokens=10))
    world.drain()  # the runner demands that no step has more than three tokens
    world.check_answers()
