"""Entry into a full queue is by share: a client with less than its share is never refused while another has more."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest

from tureen.clients.keys import Limits
from tureen.clients.queue_room import Admitted, QueueRoom
from tureen.clients.quotas import Account, ClientWork, serving
from tureen.config import Config
from tureen.errors import Unavailable

MAX_RUNNING, MAX_QUEUED = 3, 7
PLACES = MAX_RUNNING + MAX_QUEUED


class Body:
    """The requests of one body in the room, as far as the room looks at them."""

    def __init__(self, world: World, account: Account, count: int) -> None:
        self.work = ClientWork(account)
        self.outputs = [SimpleNamespace(request=SimpleNamespace(id=next(world.ids))) for _ in range(count)]
        self.is_waiting = True
        self.error: Unavailable | None = None

    def displace(self, error: Unavailable) -> None:
        assert self.is_waiting
        assert (error.code, error.retry_after_s) == ("queue_full", 2)
        self.is_waiting, self.error = False, error


class World:
    """A room and the requests in it; the engine ends displaced ones some time later."""

    def __init__(self, rng: random.Random, weights: list[float]) -> None:
        self.rng = rng
        self.ids = itertools.count()
        self.client = SimpleNamespace(num_live=0, stats=SimpleNamespace(seconds_per_end=1.5))
        config = Config(max_queued_requests=MAX_QUEUED)
        self.inside: dict[Body, object] = {}  # the oldest first
        info = SimpleNamespace(max_running_requests=MAX_RUNNING)
        self.room = QueueRoom(self.client, info, config, Admitted(), lambda: self.inside)
        self.accounts = [Account(Limits(weight=weight)) for weight in weights]

    def arrive(self, account: Account, count: int) -> tuple[bool, list[Body]]:
        """Whether the requests got in, and those that were displaced for them."""
        body = Body(self, account, count)
        before = [other for other in self.inside if other.is_waiting]
        with serving(body.work):
            coming = self.room.coming(count)
            try:
                submit = coming.__enter__()
            except Unavailable:
                assert all(other.is_waiting for other in before)
                return False, []
        for _ in range(count):
            self.client.num_live += 1
            submit()
        self.inside[body] = coming
        return True, [other for other in before if not other.is_waiting]

    def begin(self, body: Body) -> None:
        body.is_waiting = False

    def end(self, body: Body) -> None:
        """The engine has ended all outputs of a body."""
        self.client.num_live -= len(body.outputs)
        self.room.leaving.difference_update(output.request.id for output in body.outputs)
        self.inside.pop(body).__exit__(None, None, None)

    def waiting(self) -> list[Body]:
        return [body for body in self.inside if body.is_waiting]

    def num_taken(self) -> int:
        return sum(len(body.outputs) for body in self.inside if body.error is None)


def held(bodies: list[Body], account: Account) -> int:
    return sum(len(body.outputs) for body in bodies if body.work.account is account)


def check_arrival(world: World, account: Account, count: int) -> None:
    """Compares an arrival with the rule as docs/quotas.md states it, in exact arithmetic."""
    before, taken = world.waiting(), world.num_taken()
    clients = {body.work.account for body in before} | {account}
    num_places = PLACES - (taken - sum(len(body.outputs) for body in before))
    total = sum(Fraction(each.limits.weight) for each in clients)
    share = {each: num_places * Fraction(each.limits.weight) / total for each in clients}
    fits = taken + count <= PLACES
    is_modest = held(before, account) + count <= share[account]
    is_in, displaced = world.arrive(account, count)
    assert is_in == (fits or is_modest)
    assert world.num_taken() <= PLACES
    assert not (fits and displaced)
    left = list(before)  # what still waits
    for body in sorted(displaced, key=before.index, reverse=True):
        client = body.work.account
        assert not any(later.work.account is client for later in left[left.index(body) + 1 :])  # its newest
        left.remove(body)
        assert held(left, client) + len(body.outputs) > share[client]
    freed = [len(body.outputs) for body in displaced]
    assert not freed or taken + count - (sum(freed) - max(freed)) > PLACES  # no more than needed


@pytest.mark.parametrize("seed", range(40))
def test_a_modest_client_gets_in_and_takes_the_newest_waiting_place_of_one_above_its_share(seed):
    rng = random.Random(seed)
    world = World(rng, [rng.choice([1.0, 1.0, 0.5, 3.0]) for _ in range(rng.randint(1, 4))])
    for _ in range(120):
        action = rng.random()
        if action < 0.6:
            check_arrival(world, rng.choice(world.accounts), rng.choice([1, 1, 1, 2, 4]))
        elif action < 0.75 and world.waiting():
            world.begin(rng.choice(world.waiting()))
        elif world.inside:
            world.end(rng.choice(list(world.inside)))


def test_a_client_alone_may_fill_the_queue_and_gets_no_more():
    world = World(random.Random(0), [1.0])
    assert [world.arrive(world.accounts[0], 1) for _ in range(PLACES + 1)] == [(True, [])] * PLACES + [(False, [])]
