"""The real engine with the fake runner under random load: books after every step, answers at the end."""

from itertools import product

import pytest
from samples import some
from world import World, make_request, simulate

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


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "page_size"), some(product(range(300, 340), PAGE_SIZES), 40))
def test_layers_that_keep_a_state_answer_as_if_alone_with_any_number_of_saved_states(seed, page_size):
    world = simulate(seed, page_size=page_size, num_saved=seed % 7, abort_rate=0.05, fault_rate=0.02 * (seed % 2))
    world.check_answers(may_fail=seed % 2 == 1)


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "page_size"), some(product(range(400, 440), PAGE_SIZES), 40))
def test_layers_with_a_window_answer_as_if_alone_with_any_number_of_window_pages(seed, page_size):
    windows = {"window": 1 + seed % 40, "spare_tokens": seed % 5 * 30}
    options = {"abort_rate": 0.05, "fault_rate": 0.02 * (seed % 2), "num_saved": 3 if seed % 3 == 0 else None}
    world = simulate(seed, page_size=page_size, **windows, **options)
    world.check_answers(may_fail=seed % 2 == 1)


def run(world, name, tokens, *, max_new_tokens=20):
    """Answer a request alone. Return the answer and the number of tokens that were computed for it."""
    before = world.runner.num_tokens
    world.add(make_request(name, tuple(tokens), max_new_tokens=max_new_tokens, ignore_eos=True))
    while world.engine.has_work:
        world.step()
    world.check_answers()
    return world.answers[name], world.runner.num_tokens - before


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_turn_of_a_conversation_computes_only_what_follows_the_last_saved_state(page_size):
    world = World(page_size=page_size, num_pages=1024 // page_size, num_saved=40)
    tokens = [token % 60 for token in range(3, 40)]
    for turn in range(10):
        answer, num_computed = run(world, f"turn-{turn}", tokens)
        if turn:
            assert num_computed <= 5 + 20 + page_size, turn
        assert len(world.engine.cache.states.held) <= 2 * (turn + 1)  # the prompt's, and the last one of the output
        tokens = [*tokens, *answer.token_ids, *(token % 60 for token in range(turn, turn + 5))]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_prompt_that_comes_again_or_shares_its_beginning_begins_at_a_saved_state(page_size):
    world = World(page_size=page_size, num_pages=1024 // page_size, num_saved=40)
    system = [token % 60 for token in range(3, 3 + 4 * page_size + 5)]
    run(world, "first", [*system, 1, 2, 3])
    assert run(world, "again", [*system, 1, 2, 3])[1] <= page_size + 20
    run(world, "finds where the prompts part", [*system, 9, 8, 7, 6])
    if page_size > 8:  # the prompts part within a page
        assert run(world, "begins there", [*system, 4, 5, 6])[1] <= page_size + 8 + 20
    assert run(world, "begins there too", [*system, 30, 31, 32, 33])[1] <= page_size + 9 + 20
