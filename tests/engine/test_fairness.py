"""Least served client first: the bound of the paper, counted from outside; nobody starves; nothing stands idle."""

from __future__ import annotations

import random
from itertools import combinations

import msgspec
import pytest
from samples import some
from world import World, make_request, random_requests

from tureen.engine.queue import Schedule
from tureen.engine.scheduler import Scheduler

PAGES, PAGE_SIZE = 24, 4
LONGEST_PROMPT = 20
BOUND = 2 * max(LONGEST_PROMPT, 2 * PAGES * PAGE_SIZE)
"""arXiv:2401.00588: twice the larger of the costs of the longest prompt and of all tokens that fit a batch, 2 each."""


class Watched(World):
    """Keeps a record of who was served how much, and who waited, after every step."""

    def __init__(self, policy: str, weights: dict[str, float], **options) -> None:
        super().__init__(num_pages=PAGES, page_size=PAGE_SIZE, schedule=Schedule(policy), **options)
        self.weights = weights
        self.served = dict.fromkeys(weights, 0.0)
        self.history: list[tuple[dict[str, float], set[str]]] = []
        self._prompts_seen: set[str] = set()

    def step(self):
        deltas = super().step()
        running = self.engine.scheduler.running
        for sequence in running:
            self._see_prompt(sequence.request, sequence.num_cached or 0)
        for delta in deltas:
            request = self.requests[delta.id]
            if delta.usage.output_tokens:
                self._see_prompt(request, delta.usage.cached_tokens)
            self._serve(request, 2 * len(delta.token_ids))
        waiting = {sequence.request.client for sequence in self.engine.scheduler.queue.waiting}
        self.history.append((dict(self.served), waiting))
        return deltas

    def _see_prompt(self, request, num_cached) -> None:
        if request.id not in self._prompts_seen:
            self._prompts_seen.add(request.id)
            self._serve(request, len(request.token_ids) - num_cached)

    def _serve(self, request, cost) -> None:
        self.served[request.client] += cost / self.weights[request.client]


def _largest_gap(world: Watched, one: str, other: str) -> float:
    """Over all times in which both wait all the time, the largest difference of what the two are served."""
    largest = least = most = 0.0
    is_open = False
    for served, waiting in world.history:
        gap = served[one] - served[other]
        if not {one, other} <= waiting:
            is_open = False
            continue
        least, most = (min(least, gap), max(most, gap)) if is_open else (gap, gap)
        is_open = True
        largest = max(largest, most - least)
    return largest


def _run(policy: str, seed: int, weights: dict[str, float]) -> Watched:
    """Clients that come with bursts of very different sizes, lengths and times."""
    rng = random.Random(seed)
    world = Watched(policy, weights, token_budget=rng.choice([8, 32]), max_rows=rng.choice([2, 4, 8]))
    arrivals = []
    for client in weights:
        for burst in range(rng.choice([1, 2, 4])):
            start, longest = rng.randrange(300), rng.choice([4, 20, 40])
            for index in range(rng.choice([5, 20, 60])):
                prompt = [rng.randrange(64) for _ in range(rng.randrange(1, LONGEST_PROMPT))]
                request = make_request(
                    f"{client}{burst}.{index}",
                    prompt,
                    max_new_tokens=rng.randrange(1, longest + 1),
                    ignore_eos=True,
                    client=client,
                )
                arrivals.append((start, request))
    for _, request in _weighted(arrivals, weights, world):
        world.add(request)
    world.drain()
    return world


def _weighted(arrivals, weights, world):
    """In the order of their times, stepping the world until each is due."""
    for start, request in sorted(arrivals, key=lambda arrival: arrival[0]):
        while world.num_steps < start and world.engine.has_work:
            world.step()
        yield start, msgspec.structs.replace(request, client_weight=weights[request.client])


WEIGHTS = ({"ann": 1, "bob": 1, "cy": 1}, {"ann": 4, "bob": 1, "cy": 0.5})


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(12), 3))
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_clients_that_wait_at_the_same_time_are_served_alike_within_the_bound_of_the_paper(seed, weights):
    world = _run("fair", seed, weights)
    for one, other in combinations(weights, 2):
        bound = BOUND / min(weights[one], weights[other])
        assert _largest_gap(world, one, other) <= bound
    world.check_answers()


def test_the_bound_is_one_that_first_come_first_served_breaks():
    weights = {"ann": 1, "bob": 1, "cy": 1}
    worlds = (_run("fcfs", seed, weights) for seed in range(12))
    assert any(_largest_gap(world, *pair) > BOUND for world in worlds for pair in combinations(weights, 2))


def _admissions(world: World, monkeypatch) -> list[str]:
    admitted = []
    start = Scheduler._start_running

    def noting(self, sequence, table):
        if not sequence.has_begun:
            admitted.append(sequence.request.id)
        start(self, sequence, table)

    monkeypatch.setattr(Scheduler, "_start_running", noting)
    return admitted


def test_a_client_with_one_request_does_not_wait_behind_the_hundred_of_another(monkeypatch):
    world = World(max_rows=2, schedule=Schedule("fair"))
    admitted = _admissions(world, monkeypatch)
    for index in range(100):
        world.add(make_request(f"hog{index}", [index % 60, 1], max_new_tokens=8, ignore_eos=True, client="hog"))
    for _ in range(5):
        world.step()
    world.add(make_request("light", [61, 2], max_new_tokens=8, ignore_eos=True, client="light"))
    num_before = len(admitted)
    world.drain()
    assert admitted[num_before] == "light"


def test_who_was_away_has_saved_nothing_up(monkeypatch):
    world = World(max_rows=1, schedule=Schedule("fair"))
    admitted = _admissions(world, monkeypatch)
    for index in range(60):
        world.add(make_request(f"a{index}", [index, 1], max_new_tokens=4, ignore_eos=True, client="ann"))
    while len(world.ended) < 40:
        world.step()
    for index in range(20):
        world.add(make_request(f"b{index}", [index, 2], max_new_tokens=4, ignore_eos=True, client="bob"))
    num_before = len(admitted)
    world.drain()
    clients = [name[0] for name in admitted[num_before:]]
    assert all(abs(clients[:end].count("a") - clients[:end].count("b")) <= 2 for end in range(38))


def test_the_share_follows_the_weight(monkeypatch):
    world = World(max_rows=1, schedule=Schedule("fair"))
    admitted = _admissions(world, monkeypatch)
    for index in range(40):
        for client, weight in (("ann", 3.0), ("bob", 1.0)):
            request = make_request(f"{client}{index}", [index, 1], max_new_tokens=5, ignore_eos=True, client=client)
            world.add(msgspec.structs.replace(request, client_weight=weight))
    world.drain()
    assert 28 <= sum(name.startswith("ann") for name in admitted[:40]) <= 32


@pytest.mark.parametrize("by_priority", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_of_one_client_the_order_is_first_come_first_served(seed, by_priority, monkeypatch):
    orders = []
    for policy in ("fcfs", "fair"):
        rng = random.Random(seed)
        world = World(num_pages=20, max_rows=3, token_budget=16, schedule=Schedule(policy, by_priority))
        admitted = _admissions(world, monkeypatch)
        for request in random_requests(rng, world.context_len, 20):
            world.add(msgspec.structs.replace(request, client="ann", grammar=None, media=(), hidden_states="none"))
            world.step()
        world.drain()
        monkeypatch.undo()
        orders.append(admitted)
    assert orders[0] == orders[1]


def test_a_higher_priority_goes_before_a_smaller_share(monkeypatch):
    world = World(max_rows=1, schedule=Schedule("fair", by_priority=True))
    admitted = _admissions(world, monkeypatch)
    for index in range(4):
        world.add(make_request(f"hog{index}", [index, 1], ignore_eos=True, client="hog", priority=1))
    world.add(make_request("light", [9, 1], ignore_eos=True, client="light"))
    world.drain()
    assert admitted[-1] == "light"


def test_an_output_token_counts_as_two_of_a_prompt_and_a_second_that_others_waited_as_a_thousand(monkeypatch):
    """Each of bob's costs 2 + 2 * 5; what ann made others wait, 0.12 s at twice the weight, is five times that."""
    world = World(max_rows=1, schedule=Schedule("fair"))
    admitted = _admissions(world, monkeypatch)
    for index in range(8):
        for client, weight in (("ann", 2.0), ("bob", 1.0)):
            request = make_request(f"{client}{index}", [index, 1], max_new_tokens=5, ignore_eos=True, client=client)
            world.add(msgspec.structs.replace(request, client_weight=weight))
    queue = world.engine.scheduler.queue
    queue.order.held_up(queue.waiting[0], 0.12)
    world.drain()
    assert admitted[:6] == ["bob0", "bob1", "bob2", "bob3", "bob4", "ann0"]


def test_who_is_preempted_keeps_what_it_was_served_less(monkeypatch):
    world = World(max_rows=1, schedule=Schedule("fair"))
    admitted = _admissions(world, monkeypatch)
    world.add(make_request("ann0", [1, 2], max_new_tokens=5, ignore_eos=True, client="ann"))
    world.step()
    world.add(make_request("bob0", [3, 4], max_new_tokens=5, ignore_eos=True, client="bob"))
    scheduler = world.engine.scheduler
    scheduler.queue.order.held_up(scheduler.queue.waiting[0], 1.0)
    scheduler.preempt_all()
    for name in ("ann1", "ann2"):
        world.add(make_request(name, [5, 6], max_new_tokens=5, ignore_eos=True, client="ann"))
    world.drain()
    assert admitted == ["ann0", "ann1", "ann2", "bob0"]
    world.check_answers()
