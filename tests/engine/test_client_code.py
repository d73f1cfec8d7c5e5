"""Code of clients beside the steps: who waits for it, and who pays for the time that others waited."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from world import World, make_request

from tureen.engine.queue import Schedule
from tureen.errors import TooManyRequests
from tureen.sampling.processor_charges import LIMIT_S, MAX_ENDS, PAID_PER_S, SUSPENDED_S, Charges
from tureen.sampling.processor_pool import Lease, ProcessorError, key_of

CODE = '{"callable": "80"}'


class FakePool:
    """Loads nothing by itself; steps wait as long for each client as `waits` says."""

    supervisor = None

    def __init__(self, clock):
        self.charges = Charges(clock)
        self.leases = []
        self.waits = {}

    def acquire(self, client, payload):
        self.charges.check(client)
        lease = Lease(key_of(client, payload), payload)
        lease.num_users = 1
        self.leases.append(lease)
        return lease

    def release(self, lease):
        lease.num_users -= 1

    def take_waits(self):
        waits, self.waits = self.waits, {}
        return waits


@pytest.fixture
def clock():
    return SimpleNamespace(now_s=1000.0)


@pytest.fixture
def pool(clock):
    return FakePool(lambda: clock.now_s)


@pytest.fixture
def world(pool):
    made = World(schedule=Schedule("fair"), max_rows=2)
    made.engine.preparing.client_code.allow(pool)
    yield made
    made.drain()
    made.check_answers(may_fail=True)
    assert [lease.num_users for lease in pool.leases] == [0] * len(pool.leases)


def add(world, name, client, processor="", num_tokens=30):
    base = make_request(name, (1, 2, 3), max_new_tokens=num_tokens)
    params = msgspec.structs.replace(base.params, ignore_eos=True)
    world.add(msgspec.structs.replace(base, client=client, processor=processor, params=params))


def settle(pool, number=-1, error=None):
    pool.leases[number].error = error
    pool.leases[number].is_settled.set()


def num_tokens(world, name):
    return len(world.answers[name].token_ids)


def steps(world, count):
    for _ in range(count):
        world.step()


def test_one_waits_aside_until_its_code_is_loaded_and_others_go_on(world, pool):
    add(world, "a", "alice", CODE)
    add(world, "b", "bob")
    steps(world, 5)
    assert (num_tokens(world, "a"), num_tokens(world, "b")) == (0, 5)
    settle(pool)
    steps(world, 5)
    assert num_tokens(world, "a") == 5


def test_code_that_could_not_be_loaded_ends_its_request_by_name(world, pool):
    add(world, "a", "alice", CODE)
    add(world, "b", "bob")
    settle(pool, error=ProcessorError("it is none", is_rejected=True))
    steps(world, 2)
    finish = world.answers["a"].finish
    assert (finish.type, finish.status, finish.code) == ("error", 400, "custom_logit_processor_rejected")
    assert num_tokens(world, "b") == 2


def test_who_gives_up_while_his_code_is_loaded_leaves_nothing(world, pool):
    add(world, "a", "alice", CODE)
    steps(world, 1)
    world.engine.abort("a")
    steps(world, 1)
    assert world.answers["a"].finish.type == "abort"
    assert not world.engine.is_preparing
    settle(pool)


def test_an_arrival_that_breaks_off_keeps_no_code(world, pool, monkeypatch):
    def no_thread(sequence):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(world.engine.preparing, "may_queue", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        world.engine.add(msgspec.structs.replace(make_request("a", (1, 2, 3)), client="alice", processor=CODE))
    assert [lease.num_users for lease in pool.leases] == [0]
    monkeypatch.undo()


def test_names_of_registered_processors_wait_for_nothing(world, pool):
    add(world, "a", "alice", "disallowed_tokens")
    steps(world, 2)
    assert num_tokens(world, "a") == 2
    assert pool.leases == []


def test_who_made_others_wait_sits_out_as_long_and_then_goes_on(world, pool, clock):
    add(world, "a", "alice", CODE)
    settle(pool)
    add(world, "b", "bob")
    steps(world, 2)
    pool.waits = {"alice": 0.5}
    steps(world, 1)
    before = num_tokens(world, "a")
    steps(world, 5)
    assert num_tokens(world, "a") == before
    assert num_tokens(world, "b") == 8
    clock.now_s += 0.5
    steps(world, 5)
    assert num_tokens(world, "a") == before + 5


def test_where_nobody_else_runs_nobody_sits_out_or_pays(world, pool):
    add(world, "a", "alice", CODE)
    settle(pool)
    steps(world, 2)
    pool.waits = {"alice": 100.0}
    steps(world, 6)
    assert num_tokens(world, "a") == 8
    pool.charges.check("alice")


def test_one_who_sits_out_goes_on_when_the_others_have_ended(world, pool):
    add(world, "a", "alice", CODE)
    settle(pool)
    add(world, "b", "bob", num_tokens=6)
    steps(world, 1)
    pool.waits = {"alice": 1.0}
    steps(world, 1)
    before = num_tokens(world, "a")
    while world.answers["b"].finish is None:
        steps(world, 1)
    assert num_tokens(world, "a") == before
    steps(world, 3)
    assert num_tokens(world, "a") == before + 3


def test_past_the_limit_all_code_of_the_client_is_refused_whatever_its_bytes(world, pool, clock):
    add(world, "a", "alice", CODE)
    settle(pool)
    add(world, "b", "bob")
    pool.waits = {"alice": LIMIT_S + 0.1}
    steps(world, 1)
    for number in range(20):
        with pytest.raises(TooManyRequests) as caught:
            add(world, f"a{number}", "alice", f'{{"callable": "80{number:02x}"}}')
        assert caught.value.code == "custom_logit_processor_suspended"
        assert caught.value.field == "custom_logit_processor"
    add(world, "plain", "alice")
    add(world, "c", "bob", CODE)
    settle(pool)
    clock.now_s += caught.value.retry_after_s - 2
    with pytest.raises(TooManyRequests):
        pool.charges.check("alice")
    clock.now_s += 2
    add(world, "again", "alice", CODE)
    settle(pool)


def test_the_next_turn_is_another_client_s(world, pool, clock):
    add(world, "a", "alice", CODE, num_tokens=6)
    settle(pool)
    add(world, "b", "bob", num_tokens=6)
    for number in range(2):
        add(world, f"alice {number}", "alice", num_tokens=6)
        add(world, f"bob {number}", "bob", num_tokens=6)
    steps(world, 1)
    pool.waits = {"alice": 0.1}
    world.drain()
    assert set(world.ended[2:4]) | set(world.ended[:2]) >= {"b", "bob 0", "bob 1"}


# ---- the accounts alone


def test_a_share_of_the_time_is_free_for_ever(clock):
    charges = Charges(lambda: clock.now_s)
    for _ in range(10_000):
        charges.add("alice", 0.9 * PAID_PER_S)
        clock.now_s += 1.0
        charges.check("alice")


def test_more_than_that_is_refused_at_last_and_taken_again_after_the_time_that_was_said(clock):
    charges = Charges(lambda: clock.now_s)
    num_seconds = round(LIMIT_S / (2 * PAID_PER_S))
    for _ in range(num_seconds - 1):
        charges.add("alice", 3 * PAID_PER_S)
        clock.now_s += 1.0
        charges.check("alice")
    for _ in range(2):
        charges.add("alice", 3 * PAID_PER_S)
        clock.now_s += 1.0
    with pytest.raises(TooManyRequests) as caught:
        charges.check("alice")
    charges.check("bob")
    clock.now_s += caught.value.retry_after_s
    charges.check("alice")


def test_code_that_hung_is_refused_for_its_time_and_no_shorter(clock):
    charges = Charges(lambda: clock.now_s)
    charges.suspend("alice", "it did not return")
    clock.now_s += 1.0
    charges.add("alice", 0.1)
    with pytest.raises(TooManyRequests, match="it did not return") as caught:
        charges.check("alice")
    assert caught.value.retry_after_s == SUSPENDED_S - 1
    clock.now_s += SUSPENDED_S
    charges.check("alice")


def test_processes_that_others_end_are_held_against_a_client_only_when_they_are_many(clock):
    charges = Charges(lambda: clock.now_s)
    for _ in range(MAX_ENDS - 1):
        charges.note_end("alice")
    charges.check("alice")
    clock.now_s += SUSPENDED_S
    for _ in range(MAX_ENDS - 1):
        charges.note_end("alice")
    charges.check("alice")
    charges.note_end("alice")
    charges.check("bob")
    with pytest.raises(TooManyRequests, match="were recently killed"):
        charges.check("alice")
    clock.now_s += SUSPENDED_S
    charges.check("alice")


def test_accounts_are_bounded():
    charges = Charges(lambda: 0.0)
    for number in range(10_000):
        charges.add(f"client {number}", 0.1)
    assert len(charges._accounts) == 4096
