"""The real engine with the fake runner under random load: books after every step, answers at the end."""

from itertools import product

import pytest
from samples import some
from world import simulate

PAGE_SIZES = (1, 2, 16)


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "page_size"), some(product(range(60), PAGE_SIZES), 36))
def test_any_interleaving_answers_as_if_alone_and_leaves_nothing_behind(seed, page_size):
    simulate(seed, page_size=page_size).check_answers()


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "page_size"), some(product(range(100, 120), PAGE_SIZES), 20))
def test_faults_and_aborts_at_random_harm_nobody_else(seed, page_size):
    world = simulate(seed, page_size=page_size, abort_rate=0.1, fault_rate=0.02)
    world.check_answers(may_fail=True)


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "page_size"), some(product(range(200, 240), PAGE_SIZES), 25))
def test_engines_that_are_lost_at_random_and_replaced_change_no_answer(seed, page_size):
    simulate(seed, page_size=page_size, loss_rate=0.1).check_answers()
