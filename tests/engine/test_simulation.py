"""The real engine with the fake runner under random load: books after every step, answers at the end."""

import pytest
from world import simulate


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_answers_as_if_alone_and_leaves_nothing_behind(page_size, seed):
    simulate(seed, page_size=page_size).check_answers()


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(100, 120))
def test_faults_and_aborts_at_random_harm_nobody_else(page_size, seed):
    world = simulate(seed, page_size=page_size, abort_rate=0.1, fault_rate=0.02)
    world.check_answers(may_fail=True)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(200, 240))
def test_engines_that_are_lost_at_random_and_replaced_change_no_answer(page_size, seed):
    simulate(seed, page_size=page_size, loss_rate=0.1).check_answers()
