import random
import threading

import pytest
from timeouts import wait_until

native = pytest.importorskip("tureen.kernels.cpu._native")


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_thread_has_every_call_and_sees_what_was_written_before_a_barrier(threads):
    visits, stale = native.exercise_pool(native.Pool(threads), rounds=300, phases=5)
    assert visits == [300] * threads
    assert stale == 0


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_fell_asleep_at_a_barrier_are_woken(threads):
    visits, stale = native.exercise_pool(native.Pool(threads), rounds=10, phases=6, late=1000)
    assert visits == [10] * threads
    assert stale == 0


def test_threads_that_are_not_in_use_miss_nothing_when_they_are_again():
    pool, chance = native.Pool(5), random.Random(7)
    for _ in range(300):
        count = chance.randrange(1, 6)
        assert native.exercise_pool(pool, rounds=3, phases=3, count=count) == ([3] * count, 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_share_is_computed_once_however_many_threads_are_in_use(count):
    assert native.share_out(native.Pool(3), count) == [1, 1, 1]


@pytest.mark.parametrize("late", [0.002, 0.02])
def test_what_others_wait_for_a_late_thread_is_counted(late):
    """But for what passes between being about to wait and waiting, which is not long in each of many rounds."""
    pool = native.Pool(2)
    wait_until(lambda: native.longest_wait(pool, int(late * 1e6)) > late / 2, "a wait that was counted")


def test_callers_on_several_python_threads_take_turns():
    pool = native.Pool(2)
    seen = []
    callers = [
        threading.Thread(target=lambda: seen.append(native.exercise_pool(pool, rounds=200, phases=2))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert seen == [([200, 200], 0)] * 4


@pytest.mark.parametrize("threads", [0, -1])
def test_a_pool_has_a_thread(threads):
    with pytest.raises(ValueError, match="at least one thread"):
        native.Pool(threads)


def test_a_pool_has_no_more_threads_than_can_be_counted():
    with pytest.raises(ValueError, match="at most 65535 threads"):
        native.Pool(65_536)
