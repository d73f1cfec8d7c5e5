"""The memory that helper processes share: which of them end where it is short, and how many may start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tureen.sandbox import budget as budget_module
from tureen.sandbox.budget import MemoryBudget

PATIENCE_S = 120.0


class FakeWorker:
    has_begun = True

    def __init__(self, memory_bytes, idle_since_s=None):
        self.memory_bytes = memory_bytes
        self.idle_since_s = idle_since_s
        self.is_killed = False

    def kill(self):
        self.is_killed = True


class FakeOwner:
    def __init__(self, *workers):
        self.workers = list(workers)


@pytest.mark.parametrize(
    ("limit", "killed"),
    [(1000, ""), (999, "b"), (900, "b"), (899, "bc"), (700, "bc"), (699, "bcd"), (399, "bcd"), (299, "abcd")],
)
def test_where_memory_is_short_the_longest_idle_go_first_then_the_largest(limit, killed):
    workers = {"a": FakeWorker(300), "b": FakeWorker(100, 5.0), "c": FakeWorker(200, 7.0), "d": FakeWorker(400)}
    budget = MemoryBudget(limit)
    budget.add(FakeOwner(workers["a"], workers["b"]))
    budget.add(FakeOwner(workers["c"], workers["d"]))
    assert budget.used_bytes == 1000
    budget.enforce()
    assert "".join(name for name, worker in workers.items() if worker.is_killed) == killed


def test_one_that_is_gone_counts_no_more():
    owner = FakeOwner(FakeWorker(300))
    budget = MemoryBudget(100)
    budget.add(owner)
    budget.discard(owner)
    assert budget.used_bytes == 0


@pytest.fixture
def crowd():
    """A budget of 1,000 bytes of which 200 are taken, and a clock."""
    clock = SimpleNamespace(now_s=0.0)
    owner = FakeOwner(FakeWorker(200))
    budget = MemoryBudget(1000, clock=lambda: clock.now_s)
    budget.add(owner)
    return SimpleNamespace(budget=budget, owner=owner, clock=clock)


def begin(crowd, size, memory_bytes=0):
    reservation = crowd.budget.reserve(size, timeout_s=0.0)
    if reservation is not None:
        reservation.worker = FakeWorker(memory_bytes)
        crowd.owner.workers.append(reservation.worker)
    return reservation


def test_of_a_burst_only_so_many_start_as_have_room_though_they_take_nothing_yet(crowd):
    assert [begin(crowd, 300) is not None for _ in range(10)] == [True, True] + [False] * 8
    assert crowd.budget.used_bytes == 200


def test_what_starts_keeps_its_reservation_until_it_was_at_work_for_a_while(crowd):
    first = begin(crowd, 700)
    first.worker.has_begun = False
    for _ in range(3):
        crowd.budget.enforce()
        crowd.clock.now_s += budget_module.SETTLED_S
        assert begin(crowd, 200) is None
    first.worker.has_begun, first.worker.memory_bytes = True, 50
    crowd.budget.enforce()
    assert begin(crowd, 200) is None
    crowd.clock.now_s += budget_module.SETTLED_S
    crowd.budget.enforce()
    assert begin(crowd, 200) is not None


def test_what_takes_more_than_was_reserved_counts_as_it_is(crowd):
    begin(crowd, 300, memory_bytes=600)
    assert begin(crowd, 300) is None
    assert begin(crowd, 200) is not None


def test_the_only_one_that_starts_has_room_however_large_it_may_become(crowd):
    assert begin(crowd, 5000) is not None
    assert begin(crowd, 1) is None


def test_a_start_that_fails_or_an_end_gives_its_room_back_at_once(crowd):
    failed = crowd.budget.reserve(800)
    crowd.budget.release(None, failed)
    first = begin(crowd, 800)
    crowd.owner.workers.remove(first.worker)
    crowd.budget.release(first.worker)
    assert begin(crowd, 800) is not None


def test_idle_workers_make_room_for_those_that_start_the_longest_idle_first(crowd):
    old, new = FakeWorker(300, idle_since_s=1.0), FakeWorker(300, idle_since_s=2.0)
    crowd.owner.workers += [new, old]
    assert begin(crowd, 500) is not None
    assert (old.is_killed, new.is_killed) == (True, False)


def test_who_waits_for_room_goes_on_when_there_is_some(crowd):
    first = begin(crowd, 800)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(crowd.budget.reserve, 800, PATIENCE_S)
        crowd.owner.workers.remove(first.worker)
        crowd.budget.release(first.worker)
        assert waiting.result(PATIENCE_S) is not None
