"""Guesses of what comes next change no answer, whoever makes them, and save steps where they are right."""

from __future__ import annotations

import random
from itertools import count, product
from types import SimpleNamespace

import pytest
from samples import some
from world import ADAPTERS, EOS_IDS, VOCAB_SIZE, World, expected, make_request, simulate

from tureen.contract.runner import Row, RowOutput
from tureen.engine.guessing import MAX_CLIENTS, RECENT_OUTPUTS, RECENT_TOKENS, Guesser
from tureen.engine.scheduler import Drafters, StepPlan
from tureen.kernels.cpu import native


def prophet(rng, right):
    """Guesses what will be drawn; each token with probability `right`, else something else."""
    known = {}

    def guess(sequence, most, num_rows):
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
        world = World(drafter=drafter, max_rows=14)
        world.add(make_request(max_new_tokens=30, ignore_eos=True))
        world.drain()
        world.check_answers()
        return world.num_steps

    assert steps(None) == 30
    right = random.Random(1)
    right.randrange = lambda most: most - 1
    assert steps(prophet(right, 1.0)) == 1


def test_guesses_take_only_what_the_budget_of_a_step_leaves():
    world = World(token_budget=3, drafter=lambda sequence, most, num_rows: (0,) * 99)
    for index in range(2):
        world.add(make_request(f"r{index}", max_new_tokens=10))
    world.drain()  # the runner demands that no step has more than three tokens
    world.check_answers()


@pytest.mark.parametrize(("max_rows", "num_requests", "most"), [(2, 1, 18), (2, 2, 18), (3, 2, 19)])
def test_a_step_draws_few_more_tokens_than_rows_could_run_as_memory_is_planned_for_these(max_rows, num_requests, most):
    world = World(max_rows=max_rows, token_budget=200, drafter=lambda sequence, most, num_rows: (0,) * 99)
    for index in range(num_requests):
        world.add(make_request(f"r{index}", max_new_tokens=60, ignore_eos=True))
    counts = []
    for _ in range(20):
        world.step()
        counts.append(sum(1 + row.num_drafts for row in world.runner.last.rows))
    assert max(counts) == most


class Repeating:
    """A sequence whose tokens repeat, as the guesser sees it."""

    def __init__(self, token_ids=(1, 2, 3, 4, 5, 6, 7, 8) * 4, *, num_prompt=0, **request):
        self.token_ids = list(token_ids)
        self.request = make_request(**request)
        self.terms = SimpleNamespace(num_prompt=num_prompt)
        self.num_left = 99


def timed_guesser(seconds):
    """A guesser on a clock on which a step over that number of tokens takes `seconds(tokens)`."""
    now = [0.0]
    guesser = Guesser(native.require(), clock=lambda: now[0])

    def step(num_rows, num_guesses, num_right=0, sequence=None):
        rows = [Row(0, (1,) * (1 + num_guesses), 0, (), True, num_drafts=num_guesses)]
        rows += [Row(0, (1,), 0, (), True)] * (num_rows - 1)
        sequences = [sequence or Repeating()] + [Repeating() for _ in rows[1:]]

        def run(plan):
            now[0] += seconds(num_rows + num_guesses)
            return (RowOutput((1,) * (1 + num_right)), *[RowOutput((1,))] * (num_rows - 1))

        guesser.run(StepPlan(sequences, rows, []), run)

    return guesser, step


@pytest.mark.parametrize(("cost", "least", "most"), [(0.02, 15, 16), (0.3, 2, 8), (1.0, 0, 0)])
def test_as_many_tokens_are_guessed_as_their_measured_cost_allows(cost, least, most):
    guesser, step = timed_guesser(lambda tokens: 1 + cost * (tokens - 1))
    for _ in range(60):
        step(1, 0)
        step(1, 4)
    assert least <= len(guesser.guess(Repeating(), 99, 1)) <= most


def test_no_token_is_guessed_before_a_step_without_guesses_was_measured():
    guesser, step = timed_guesser(lambda tokens: tokens)
    assert guesser.guess(Repeating(), 99, 2) == ()
    step(1, 0)
    assert guesser.guess(Repeating(), 99, 2) == ()
    step(2, 0)
    assert guesser.guess(Repeating(), 99, 2)


def test_among_many_rows_fewer_tokens_are_guessed():
    guesser, step = timed_guesser(lambda tokens: tokens)
    for num_rows in (1, 4, 64):
        step(num_rows, 0)
    counts = [len(guesser.guess(Repeating(), 99, num_rows)) for num_rows in (1, 4, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] == 0


def test_wrong_guesses_end_the_guessing_and_right_ones_begin_it_again():
    guesser, step = timed_guesser(lambda tokens: 1 + 0.3 * tokens)
    sequence = Repeating()
    step(1, 0)
    assert len(guesser.guess(sequence, 99, 1)) > 2
    for _ in range(20):
        step(1, 3, 0, sequence)
    assert guesser.guess(sequence, 99, 1) == ()
    for _ in range(20):
        step(1, 3, 3, sequence)
    assert len(guesser.guess(sequence, 99, 1)) > 6


def test_a_sequence_that_repeats_nothing_gets_no_guesses():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    sequence = Repeating()
    sequence.token_ids = list(range(40))
    assert guesser.guess(sequence, 99, 1) == ()
    assert guesser.guess(sequence, 99, 1) == ()


def test_tokens_of_a_picture_are_not_guessed():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    sequence = Repeating()
    sequence.token_ids = [1, 2, 3, 4, -(1 << 60), -(1 << 60), 5, 1, 2, 3]
    assert guesser.guess(sequence, 99, 1) == (4,)
    sequence.token_ids += [4]
    assert guesser.guess(sequence, 99, 1) == ()


def test_an_engine_reports_how_many_guesses_were_right():
    world = World(drafter=prophet(random.Random(5), 0.5))
    world.add(make_request(max_new_tokens=40, ignore_eos=True))
    world.drain()
    world.check_answers()
    stats = world.engine.stats()
    assert stats.total_guessed_tokens > stats.total_right_guesses > 0
    assert stats.total_right_guesses == 40 - world.num_steps
    usage = world.answers["r"].usage
    assert (usage.guessed_tokens, usage.right_guesses) == (stats.total_guessed_tokens, stats.total_right_guesses)


def test_right_guesses_after_the_end_of_an_output_do_not_count():
    coming = (11, 12, *EOS_IDS, 13, 14, 15, 16, 17, 18)
    world = World(
        choose=lambda token, state, outputs: coming[len(outputs)] if len(outputs) < len(coming) else 1,
        drafter=lambda sequence, most, num_rows: coming[sequence.num_output :][:most],
    )
    world.add(make_request(max_new_tokens=30))
    world.drain()
    answer, stats = world.answers["r"], world.engine.stats()
    assert answer.token_ids == [11, 12, *EOS_IDS]
    assert stats.total_right_guesses == len(answer.token_ids) - world.num_steps
    assert (answer.usage.guessed_tokens, answer.usage.right_guesses) == (len(coming), stats.total_right_guesses)


def begun(**request):
    """A sequence whose output begins as those that `repeated` made."""
    return Repeating((9, 9, 9, 20, 21, 22), num_prompt=3, **request)


def repeated(guesser, *outputs, **request):
    for output in outputs:
        guesser.ended(Repeating((7, 7, *output), num_prompt=2, **request))


def test_an_output_is_guessed_from_recent_ones_of_its_client_and_of_no_other():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    repeated(guesser, range(20, 30), client="a", cache_salt="s")
    assert guesser.guess(begun(client="a", cache_salt="s"), 1, 1) == (23,)
    for other in ({"client": "b", "cache_salt": "s"}, {"client": "a"}):
        assert guesser.guess(begun(**other), 3, 1) == ()


def test_guesses_do_not_run_from_one_recent_output_into_the_next_nor_come_from_prompts():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    repeated(guesser, (30, 31, 32, 33, 20, 21, 22, 23), (40, 41, 42, 43))
    assert guesser.guess(begun(), 3, 1) == (23,)
    repeated(guesser, (19, 20, 21), (22, 23, 24))
    assert guesser.guess(Repeating((7, 7)), 3, 1) == ()


def test_few_recent_outputs_of_few_clients_are_kept_and_of_long_ones_the_end():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    repeated(guesser, range(20, 30), *[(1, 1, 1)] * (RECENT_OUTPUTS - 1), client="kept")
    repeated(guesser, range(20, 30), *[(1, 1, 1)] * RECENT_OUTPUTS, client="old")
    repeated(guesser, [*range(20, 30), *[1] * RECENT_TOKENS], client="long")
    for client, expected_guess in (("kept", (23,)), ("old", ()), ("long", ())):
        assert guesser.guess(begun(client=client), 1, 1) == expected_guess
    for number in range(MAX_CLIENTS):
        repeated(guesser, (1, 1, 1), client=str(number))
    assert guesser.guess(begun(client="kept"), 1, 1) == ()


@pytest.mark.parametrize("short", [(), (1,), (1, 1)])
def test_outputs_too_short_to_guess_from_take_no_place_of_longer_ones(short):
    """Embeddings, scores, answers of one word, and requests that ended in the queue."""
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    repeated(guesser, range(20, 30), *[short] * RECENT_OUTPUTS)
    for number in range(MAX_CLIENTS):
        repeated(guesser, short, client=str(number))
    assert guesser.guess(begun(), 1, 1) == (23,)


def test_a_flushed_engine_has_no_recent_outputs():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    world = World()
    world.engine.rows.guesser = guesser
    repeated(guesser, range(20, 30))
    world.engine.control.flush_cache()
    assert guesser.guess(begun(), 1, 1) == ()


def test_saved_time_is_that_of_the_steps_that_right_guesses_replaced_less_what_the_guesses_took():
    guesser, step = timed_guesser(lambda tokens: 0.6 + 0.4 * tokens)
    step(1, 0)
    step(1, 4, 3)
    assert guesser.saved_s == pytest.approx(4 * 1.0 - 2.6)
    step(1, 4, 0)
    assert guesser.saved_s == pytest.approx(4 * 1.0 - 2.6 + 1.0 - 2.6)


def test_the_second_of_two_equal_answers_takes_fewer_steps():
    coming = tuple(range(14, 54))
    world = World(
        choose=lambda token, state, outputs: coming[len(outputs)] if len(outputs) < len(coming) else EOS_IDS[0]
    )
    ticks = count()
    world.engine.rows.guesser = guesser = Guesser(native.require(), clock=lambda: float(next(ticks)))
    world.engine.scheduler.drafters = Drafters(guesser.guess)
    steps = [0]
    for name in ("first", "second"):
        world.add(make_request(name, max_new_tokens=40))
        world.drain()
        steps.append(world.num_steps)
    assert world.answers["first"].token_ids == world.answers["second"].token_ids == list(coming)
    assert steps[2] - steps[1] < (steps[1] - steps[0]) / 2
    assert world.engine.stats().total_saved_s > 0


def test_drafted_guesses_and_those_from_repeated_text_are_scored_apart():
    guesser, step = timed_guesser(lambda tokens: tokens)
    step(1, 0)
    sequence = Repeating()
    guesses = guesser._of(sequence)
    guesser._drafting = {sequence: 3}
    step(1, 3, 0, sequence)
    assert guesses.repeated.chance(0.5) == 0.5
    assert guesses.drafted.chance(0.5) < 0.5
    after = guesses.drafted.chance(0.5)
    step(1, 3, 3, sequence)
    assert guesses.repeated.chance(0.5) > 0.5
    assert guesses.drafted.chance(0.5) == after
