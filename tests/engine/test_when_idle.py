"""What runs when idle: it has the steps that nobody else could use, and gives way without a trace."""

from __future__ import annotations

import random

import msgspec
import pytest
from samples import some
from world import World, make_request

from tureen.engine.queue import Schedule
from tureen.errors import Unavailable


def idle(request):
    return msgspec.structs.replace(request, when_idle=True)


class Recorded(World):
    """Keeps the rows of each step: (request, first token, number of tokens, whether it draws)."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.plans: list[list[tuple[str, int, int, bool]]] = []
        schedule = self.engine.scheduler.schedule

        def recorded():
            plan = schedule()
            rows = zip(plan.sequences, plan.rows, strict=True)
            self.plans.append([(s.request.id, row.start, len(row.token_ids), row.sample) for s, row in rows])
            return plan

        self.engine.scheduler.schedule = recorded

    def of_others(self):
        """The steps with rows of what does not run when idle."""
        return [plan for plan in self.plans if plan and not plan[0][0].startswith("idle")]

    @property
    def has_others(self) -> bool:
        return any(not name.startswith("idle") for name, answer in self.answers.items() if answer.finish is None)


def run(world: Recorded, arrivals, num_idle_steps) -> Recorded:
    """Requests come after so many steps of their like; where none of these is left, after `num_idle_steps` more."""
    waiting = list(arrivals)
    while waiting or world.has_others:
        if not world.has_others:
            for _ in range(num_idle_steps):
                world.step()
            world.add(waiting.pop(0)[1])
        while waiting and waiting[0][0] <= len(world.of_others()):
            world.add(waiting.pop(0)[1])
        world.step()
    world.drain()
    return world


def draw(rng: random.Random, name: str, **more):
    return make_request(
        name,
        [rng.randrange(60) for _ in range(rng.randrange(1, 40))],
        seed=rng.randrange(99),
        temperature=1.0,
        max_new_tokens=rng.randrange(1, 40),
        ignore_eos=True,
        client=rng.choice("xy"),
        priority=rng.randrange(3),
        **more,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair"])
@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("seed", some(range(12), 3))
def test_the_rows_of_others_are_the_same_with_and_without_what_runs_when_idle(seed, by_priority, policy):
    rng = random.Random(seed)
    options = {"num_pages": 40, "page_size": 4, "max_rows": rng.choice([1, 2, 4]), "token_budget": rng.choice([8, 32])}
    options |= {"prefix_cache": False, "schedule": Schedule(policy, by_priority), "context_len": 100}
    times = sorted(rng.randrange(120) for _ in range(12))
    arrivals = [(at, draw(rng, f"r{index}")) for index, at in enumerate(times)]
    alone = run(Recorded(**options), arrivals, 0)
    beside = Recorded(**options)
    for index in range(9):
        beside.add(idle(draw(rng, f"idle{index}")))
    for _ in range(rng.randrange(5)):
        beside.step()
    run(beside, arrivals, 3)
    assert beside.of_others() == alone.of_others()
    assert all(len({row[0].startswith("idle") for row in plan}) <= 1 for plan in beside.plans), "a step for both"
    assert sum(map(len, beside.plans)) > sum(map(len, alone.plans))
    beside.check_answers()


def test_what_runs_when_idle_has_all_steps_where_nobody_else_is():
    world = Recorded()
    for index in range(3):
        world.add(idle(make_request(f"idle{index}", [index] * 5, max_new_tokens=9, ignore_eos=True)))
    world.drain()
    assert [len(plan) for plan in world.plans if plan] == [3] * 9
    world.check_answers()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_it_gives_up_its_only_slot_at_once_and_goes_on_afterwards(prefix_cache):
    world = Recorded(max_rows=1, prefix_cache=prefix_cache)
    world.add(idle(make_request("idle", range(20), max_new_tokens=30, ignore_eos=True)))
    for _ in range(5):
        world.step()
    world.add(make_request("r", [1, 2, 3], max_new_tokens=4, ignore_eos=True))
    world.step()
    assert world.plans[-1] == [("r", 0, 3, True)]
    world.drain()
    assert world.ended == ["r", "idle"]
    world.check_answers()


def test_nobody_waits_for_pages_that_it_computes():
    world = Recorded(page_size=4, token_budget=8, num_pages=200)
    world.add(idle(make_request("idle", range(40))))
    world.step()
    world.add(make_request("r", [*range(40), 1]))
    world.step()
    assert world.plans[-1] == [("r", 8, 8, False)]  # what is cached is reused
    world.drain()
    world.check_answers()


def test_it_takes_no_place_in_the_queue_of_others_and_is_never_refused_for_want_of_one():
    world = Recorded(max_rows=1, max_queued=2)
    for index in range(9):
        world.add(idle(make_request(f"idle{index}", [index])))
    world.step()
    for index in range(3):
        world.add(make_request(f"r{index}", [index]))
    with pytest.raises(Unavailable):
        world.add(make_request("r3", [3]))
    world.add(idle(make_request("idle9", [9])))
    world.drain()
    assert world.ended[:3] == ["r0", "r1", "r2"]
    world.add(make_request("r4", [4]))
    world.drain()
    world.check_answers()


def test_a_client_pays_nothing_for_it_with_its_other_requests():
    world = Recorded(max_rows=1, schedule=Schedule("fair"))
    world.add(idle(make_request("idle", [1] * 30, max_new_tokens=30, ignore_eos=True, client="x")))
    for _ in range(20):
        world.step()
    for index in range(4):
        world.add(make_request(f"r{index}", [index], client="yxyx"[index]))
    world.drain()
    assert world.ended == ["r0", "r1", "r2", "r3", "idle"]


def test_clients_share_the_idle_steps_fairly():
    world = Recorded(max_rows=1, schedule=Schedule("fair"))
    for index in range(6):
        world.add(idle(make_request(f"idle{index}", [index] * 5, client="x" if index < 4 else "y")))
    world.drain()
    assert world.ended == ["idle0", "idle4", "idle1", "idle5", "idle2", "idle3"]
