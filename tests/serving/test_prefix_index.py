"""Which replica a request goes to: sessions are simulated, and the index is compared with lists of what was given."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import subprocess
import sys
from collections import OrderedDict

import msgspec
import pytest
import samples
from fake_engine import make_request

from tureen.data_parallel.prefix_index import PrefixIndex, Standing, choose

PAGE = 64
CACHE_PAGES = 384_000 // PAGE
PAGES_A_SECOND = 125  # that one simulated replica computes
NUM_SYSTEM_PROMPTS = 200
BUSY = 0.7
EXPECTED_PAGES = 4  # of an output, as the choice guesses


class SimulatedReplica:
    """Its least recently used pages, and when it has computed all that it was given."""

    def __init__(self):
        self.cache = OrderedDict()
        self.free_s = 0.0
        self.num_computed = 0

    def run(self, prompt, answer, now_s):
        """The pages of the prompt that it has, and when the answer is there."""
        num_found = next((at for at, page in enumerate(prompt) if page not in self.cache), len(prompt))
        for page in reversed(prompt + answer):
            self.cache[page] = None
            self.cache.move_to_end(page)
        while len(self.cache) > CACHE_PAGES:
            self.cache.popitem(last=False)
        work = len(prompt) - num_found + len(answer)
        self.num_computed += work
        self.free_s = max(self.free_s, now_s) + work / PAGES_A_SECOND
        return num_found, self.free_s


class Simulation:
    """Sessions of some turns each, on popular system prompts. A page is a number that no other text has. A turn comes
    to any of the fronts, which tell each other every second where they have sent what, unless they are `silent`."""

    def __init__(self, num_replicas, seed=1, num_fronts=1, *, silent=False):
        self.dice = random.Random(seed)
        self.numbers = itertools.count()
        self.replicas = [SimulatedReplica() for _ in range(num_replicas)]
        self.indices = [PrefixIndex(num_replicas, PAGE, CACHE_PAGES) for _ in range(num_fronts)]
        self.told_s = 0.0 if num_fronts > 1 and not silent else float("inf")
        for index in self.indices:
            index.share()
        self.loads, self.given = [0.0] * num_replicas, [0.0] * num_replicas
        self.num_found = self.num_asked = 0
        self.running = []  # (when it ends, number, front's index, replica, cost, pages that it leaves)

    def text(self, least, most):
        return tuple(itertools.islice(self.numbers, self.dice.randrange(least, most)))

    def by_prefix(self, known, costs):
        standings = [Standing(at, *self.at(at), known[at]) for at in range(len(self.replicas))]
        return choose(standings, min(costs))

    def by_chance(self, known, costs):
        return self.dice.randrange(len(self.replicas))

    def at(self, number):
        return self.loads[number], self.given[number]

    def end_until(self, now_s):
        while self.running and self.running[0][0] <= now_s:
            _, _, index, place, cost, pages = heapq.heappop(self.running)
            self.loads[place] -= cost
            index.give(place, pages)
        if now_s > self.told_s + 1:
            self.told_s = now_s
            news = [(index, index.take_news()) for index in self.indices]
            for index, (told_by, pages) in itertools.product(self.indices, news):
                if index is not told_by:
                    index.hear(pages)

    def run(self, pick, sessions_a_replica=120):
        """The share of prompt pages that were cached, and the work of the busiest replica over the mean."""
        systems = [self.text(3, 23) for _ in range(NUM_SYSTEM_PROMPTS)]
        weights = [1 / (rank + 1) for rank in range(NUM_SYSTEM_PROMPTS)]
        num_replicas, now_s, arrivals = len(self.replicas), 0.0, []
        for number in range(sessions_a_replica * num_replicas):
            now_s += self.dice.expovariate(num_replicas * PAGES_A_SECOND * BUSY / 50)
            heapq.heappush(
                arrivals, (now_s, number, self.dice.choices(systems, weights)[0], self.dice.randrange(3, 10))
            )
        while arrivals:
            now_s, number, history, num_turns = heapq.heappop(arrivals)
            self.end_until(now_s)
            prompt, answer = history + self.text(1, 4), self.text(1, 7)
            index = self.dice.choice(self.indices) if len(self.indices) > 1 else self.indices[0]
            known = index.num_known(prompt)
            costs = [len(prompt) - depth + EXPECTED_PAGES for depth in known]
            place = pick(known, costs)
            index.give(place, prompt)
            self.loads[place] += costs[place]
            self.given[place] += costs[place]
            num_found, end_s = self.replicas[place].run(prompt, answer, now_s)
            self.num_found, self.num_asked = self.num_found + num_found, self.num_asked + len(prompt)
            left = (index, place, costs[place], prompt + answer)
            heapq.heappush(self.running, (end_s, next(self.numbers), *left))
            if num_turns > 1:
                again_s = end_s + self.dice.expovariate(0.1)
                heapq.heappush(arrivals, (again_s, number, prompt + answer, num_turns - 1))
        works = [replica.num_computed for replica in self.replicas]
        return self.num_found / self.num_asked, max(works) * len(works) / sum(works)


@pytest.mark.sampled
@pytest.mark.parametrize("num_replicas", [8, samples.either(64, 16)])
def test_sessions_find_their_pages_and_no_replica_is_much_busier_than_the_mean(num_replicas):
    simulation = Simulation(num_replicas)
    share, busiest = simulation.run(simulation.by_prefix)
    assert share >= 0.8
    assert busiest <= 1.15


def test_sessions_whose_turns_come_to_any_of_four_fronts_find_as_many_pages():
    """The turns are seconds apart, and so is the news."""
    simulation = Simulation(8, num_fronts=4)
    share, busiest = simulation.run(simulation.by_prefix)
    assert share >= 0.8
    assert busiest <= 1.15
    silent = Simulation(8, num_fronts=4, silent=True)
    assert silent.run(silent.by_prefix)[0] <= 0.65


def test_who_has_forgotten_a_prompt_learns_all_of_it_with_its_next_page():
    first, second = (PrefixIndex(1, PAGE, 100) for _ in range(2))
    first.share()
    first.give(0, [1, 2, 3])
    second.hear(first.take_news())
    second.forget(0)
    first.give(0, [1, 2, 3])
    assert first.take_news() == [[]]
    first.give(0, [1, 2, 3, 4])
    second.hear(first.take_news())
    assert second.num_known([1, 2, 3, 4]) == [4]


def test_pages_have_the_same_names_in_every_process():
    told = []
    for seed in ("1", "2"):
        code = "from test_prefix_index import *; print(PrefixIndex(1, 4, 9).pages_of(named_request()))"
        path = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", code]
        told.append(subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}))
    assert told[0] == told[1]
    assert len(told[0]) > 20


def named_request():
    return msgspec.structs.replace(make_request("r", "abcdefghij"), cache_salt="mine", adapter="whisper")


def test_without_the_index_far_fewer_pages_are_found():
    simulation = Simulation(8)
    share, _ = simulation.run(simulation.by_chance)
    assert share <= 0.65


def test_the_longest_prefix_wins_until_its_replica_is_overloaded():
    assert choose([Standing(0, 100, 0, 3), Standing(1, 0, 0, 2)], cost=60) == 0  # 100 of a mean of 80
    assert choose([Standing(0, 101, 0, 3), Standing(1, 0, 0, 2)], cost=60) == 1
    assert choose([Standing(0, 5, 9, 0), Standing(2, 4, 99, 0), Standing(5, 4, 7, 0)], cost=20) == 5
    assert choose([Standing(3, 1e9, 0, 0)], cost=1) == 3


def test_the_index_knows_the_newest_pages_of_each_replica_and_no_more():
    dice, most = random.Random(5), 12
    index = PrefixIndex(3, 4, most)
    given = [[] for _ in range(3)]  # newest first: all that was ever given
    prompts = [tuple(f"{prompt}.{page}" for page in range(dice.randrange(1, 9))) for prompt in range(12)]
    for _ in range(400):
        number, pages = dice.randrange(3), dice.choice(prompts)
        if dice.random() < 0.02:
            index.forget(number)
            given[number] = []
        else:
            index.give(number, pages)
            given[number] = [*pages, *(page for page in given[number] if page not in pages)][:most]
        asked = dice.choice(prompts)
        expected = [next((at for at, page in enumerate(asked) if page not in own), len(asked)) for own in given]
        assert index.num_known(asked) == expected
        assert len(index) == len({page for own in given for page in own})


def test_pages_are_those_that_an_engine_may_share():
    index = PrefixIndex(2, 4, 100)
    prompt = make_request("r", "abcdefghij")
    pages = index.pages_of(prompt)
    assert len(pages) == 2
    assert index.pages_of(make_request("r", "abcdefgh")) == pages[:1], "the last token is computed in any case"
    assert index.pages_of(make_request("r", "abcdefg"), tuple(b"hij")) == pages
    assert index.pages_of(make_request("r", "abcdXfghij"))[:1] == pages[:1]
    for changed in ({"cache_salt": "mine"}, {"adapter": "whisper"}, {"token_ids": tuple(b"bbcdefghij")}):
        assert not set(index.pages_of(msgspec.structs.replace(prompt, **changed))) & set(pages)
    assert index.pages_of(msgspec.structs.replace(prompt, embeds=b"1234")) == ()
