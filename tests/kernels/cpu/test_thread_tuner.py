"""How many threads share a step, as times that are made up say."""

import random
from collections import Counter

import pytest

native = pytest.importorskip("tureen.kernels.cpu._native")

MOST_STEPS = 200
"""Within so many a change of the machine is noticed."""


def _run(tuner, steps, seconds_of, *, waited_of=lambda threads: 0.0, tokens_of=lambda step: 1):
    """The numbers of threads that steps were shared by. seconds_of(threads): of a step, a token."""
    used = []
    for step in range(steps):
        threads = tuner.threads
        seconds = seconds_of(threads) * tokens_of(step)
        tuner.took(tokens_of(step), seconds, waited_of(threads) * seconds)
        used.append(threads)
    return used


def _quiet(threads):
    return 1.0 / threads


def _make_neighboured(cores, busy):
    """(seconds, share waited) by threads: those beyond the cores that are free come late, and all wait for them."""

    def seconds(threads):
        return 2.6 / threads if threads > cores - busy else 1.0 / threads

    return seconds, lambda threads: 0.5 if threads > cores - busy else 0.0


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_all_threads_stay_where_each_helps(most):
    used = _run(native.ThreadTuner(most, True), 10_000, _quiet)
    assert Counter(used)[most] >= 9_994


def test_where_two_processors_are_one_core_one_thread_is_used():
    used = _run(native.ThreadTuner(2, True), 3_000, lambda threads: {1: 1.0, 2: 1.2}[threads])
    assert set(used[MOST_STEPS // 2 :][:50]) == {1}
    assert Counter(used)[2] < 200


def test_half_of_the_threads_are_used_where_processors_share_cores():
    used = _run(native.ThreadTuner(8, True), 3_000, lambda threads: 1.0 / threads if threads <= 4 else 0.27)
    assert Counter(used).most_common(1)[0][0] == 4


def test_a_gain_too_small_to_matter_changes_nothing():
    assert Counter(_run(native.ThreadTuner(2, True), 1_000, lambda threads: {1: 0.97, 2: 1.0}[threads]))[2] > 990


@pytest.mark.parametrize(("most", "busy"), [(2, 1), (8, 1), (8, 2)])
def test_processors_that_others_keep_busy_are_given_up_and_taken_back(most, busy):
    tuner = native.ThreadTuner(most, False)
    seconds, waited = _make_neighboured(most, busy)
    assert set(_run(tuner, 500, _quiet)) == {most}
    assert _run(tuner, MOST_STEPS, seconds, waited_of=waited)[-1] == most - busy
    later = Counter(_run(tuner, 5_000, seconds, waited_of=waited))
    assert later[most - busy] > 0.94 * later.total()
    assert _run(tuner, 2 * MOST_STEPS, _quiet)[-1] == most


def test_waiting_alone_changes_nothing_where_fewer_threads_are_no_faster():
    used = _run(native.ThreadTuner(2, False), 5_000, _quiet, waited_of=lambda threads: 0.4 * (threads > 1))
    assert Counter(used)[2] > 0.94 * 5_000


def test_nothing_is_tried_without_a_cause():
    assert set(_run(native.ThreadTuner(2, False), 5_000, lambda threads: {1: 0.5, 2: 1.0}[threads])) == {2}


def test_steps_that_grow_are_compared_fairly():
    tuner, step = native.ThreadTuner(2, True), 0
    for step in range(300):
        threads = tuner.threads
        tuner.took(1, (1.0 + 0.05 * step) / threads, 0.0)
    assert tuner.threads == 2


def test_steps_of_sizes_that_cannot_be_compared_decide_nothing():
    sizes = [512, 100]
    tuner = native.ThreadTuner(2, False)
    used = _run(tuner, 3_000, _quiet, waited_of=lambda threads: 0.5, tokens_of=lambda step: sizes[step % 2])
    assert Counter(used)[2] > 0.8 * 3_000


def test_a_prompt_among_small_steps_is_no_measure_of_them():
    chance = random.Random(2)
    sizes = [chance.choice((1, 1, 1, 7)) for _ in range(3_000)]
    tuner = native.ThreadTuner(2, True)
    used = _run(tuner, 3_000, lambda threads: {1: 1.0, 2: 1.2}[threads], tokens_of=lambda step: sizes[step])
    assert Counter(used).most_common(1)[0][0] == 1


def test_the_same_times_give_the_same_numbers():
    def run():
        chance = random.Random(4)
        tuner = native.ThreadTuner(4, True)
        return _run(tuner, 2_000, lambda threads: chance.uniform(0.5, 2.0), waited_of=lambda _: chance.random())

    assert run() == run()
    assert len(set(run())) > 1


def test_a_tuner_that_is_told_of_a_change_asks_soon():
    tuners = [native.ThreadTuner(2, False) for _ in range(2)]
    seconds, waited = _make_neighboured(2, 1)
    for tuner in tuners:
        _run(tuner, 2_000, seconds, waited_of=waited)
    tuners[0].hurry()
    noticed = [_run(tuner, MOST_STEPS * 2, _quiet).index(2) for tuner in tuners]
    assert noticed[0] <= noticed[1]
    assert noticed[0] <= 17
