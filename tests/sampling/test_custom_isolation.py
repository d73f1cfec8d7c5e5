"""What requests with custom logit processors may not do to each other, and what outlives a step."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import inline_workers
import numpy as np
import pytest
from arithmetics import make_rows, make_sampler
from client_processors import (
    PATIENCE_S,
    VOCAB,
    another,
    hanging,
    load,
    run_steps,
    sent,
    state,
    steps,
    use_inline_workers,
)  # fmt: skip

from tureen.errors import TooManyRequests, Unavailable
from tureen.sampling import processor_messages, processor_pool
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.processor_pool import ProcessorPool

pytestmark = pytest.mark.usefixtures("patient_sandbox", "each_arithmetic", "inline")

ONLY = sent("""
logits[:, :] = -float("inf")
for i, params in enumerate(custom_param_list):
    logits[i, params["token_id"]] = 0.0
return logits
""")
COUNT = """
params = custom_param_list[0]
params["calls"] = params.get("calls", 0) + 1
logits[:, :] = -float("inf")
logits[0, params["calls"]] = 0.0
return logits
"""


@pytest.fixture(scope="module")
def inline():
    """No pool starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        use_inline_workers(patch)
        yield


@pytest.fixture(scope="module")
def processors(inline):
    made = CustomProcessors(load_registered(()), ProcessorPool(20, VOCAB))
    made.pool.charges.suspend = lambda client, why: None  # what comes of a charge is tested elsewhere
    yield made
    made.close()


def only(processors, token_id):
    """What ONLY makes of a row now."""
    [[row]] = steps(processors, [state(0, ONLY, params={"token_id": token_id})], 1)
    return row.token_id


@pytest.mark.parametrize("wrong", [{}, {"token_ids": [VOCAB]}, {"token_ids": [-1]}, {"token_ids": 3}])
def test_wrong_parameters_of_a_built_in_fail_only_the_request_that_sent_them(processors, wrong):
    good = state(0, "disallowed_tokens", params={"token_ids": [3]})
    [alone] = steps(processors, [good, state(1), state(2)], 1)
    bad = state(1, "disallowed_tokens", params=wrong)
    [together] = steps(processors, [good, bad, state(2)], 1)
    assert together[1].error.status == 400
    assert "token_ids" in together[1].error.message
    assert (together[0], together[2]) == (alone[0], alone[2])


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.5])
def test_an_ngram_size_that_means_nothing_is_refused(processors, size):
    [[row]] = steps(processors, [state(0, "no_repeat_ngram", output=(1, 2), params={"ngram_size": size})], 1)
    assert (row.error.status, row.error.field) == (400, "custom_params")


def test_where_one_row_makes_shared_code_raise_the_others_are_not_affected(processors):
    rows = [state(0, ONLY, params={"token_id": 4}), state(1, ONLY), state(2, ONLY, params={"token_id": 6})]
    [found] = steps(processors, rows, 1)
    assert [row.token_id for row in found] == [4, None, 6]
    assert "KeyError" in found[1].error.message


def test_integers_of_any_size_reach_the_processor(processors):
    body = "logits[:, :] = -float('inf')\nlogits[0, custom_param_list[0]['x'] % 97] = 0.0\nreturn logits"
    [[row]] = steps(processors, [state(0, sent(body), params={"x": 10**30})], 1)
    assert row.token_id == 10**30 % 97


def test_a_step_that_breaks_off_leaves_no_reply_to_be_taken_for_the_next_one(processors, monkeypatch):
    assert only(processors, 10) == 10
    start = processor_pool.RemoteProcessor.start

    def break_off(processor, logits, sequences, until_s):
        if len(sequences) == 2:
            raise RuntimeError
        start(processor, logits, sequences, until_s)

    other = sent("return logits")
    rows = [state(0, ONLY, params={"token_id": 11}), state(1, other), state(2, other)]
    with monkeypatch.context() as patch:
        patch.setattr(processor_pool.RemoteProcessor, "start", break_off)
        with pytest.raises(RuntimeError):
            steps(processors, rows, 1)
    assert [only(processors, token_id) for token_id in (20, 21, 22)] == [20, 21, 22]


def test_a_reply_to_another_message_ends_the_worker(processors):
    one = state(0, sent(f"marker = {next(another)}\nreturn logits"))
    [lease] = load(processors, [one])
    worker = lease.processor.worker
    worker.answer_with(lambda _: processor_messages.reply(7, processor_messages.DONE))
    [[row]] = run_steps(processors, [one], 1)
    assert "out of order" in row.error.message
    assert worker.is_lost
    assert only(processors, 8) == 8
    processors.pool.release(lease)


def test_many_that_hang_hold_up_a_step_no_longer_than_one(processors, monkeypatch):
    waited = []
    finish = processor_pool.RemoteProcessor.finish

    def noting(processor, num_rows, until_s):
        waited.append(until_s)
        return finish(processor, num_rows, until_s)

    monkeypatch.setattr(processor_pool.RemoteProcessor, "finish", noting)
    [found] = steps(processors, [state(index, hanging()) for index in range(4)], 1)
    assert all("within" in row.error.message for row in found)
    assert len(waited) == 4
    assert len(set(waited)) == 1  # one moment for all calls


@pytest.fixture
def gate(monkeypatch):
    """No code is loaded before it opens."""
    opened, load_ = threading.Event(), processor_pool.RemoteProcessor.load

    def load_late(processor, payload):
        assert opened.wait(PATIENCE_S)
        load_(processor, payload)

    monkeypatch.setattr(processor_pool.RemoteProcessor, "load", load_late)
    yield opened
    opened.set()


def test_code_that_hangs_while_it_is_loaded_holds_up_no_step(processors, gate):
    gate.set()
    [ready] = load(processors, [state(0, ONLY)])
    gate.clear()
    lease = processors.pool.acquire("", hanging("__init__"))
    assert only(processors, 10) == 10
    gate.set()
    assert lease.is_settled.wait(PATIENCE_S)
    assert "not loaded within" in str(lease.error)
    assert lease.error.is_rejected
    for each in (ready, lease):
        processors.pool.release(each)


def test_the_processors_that_requests_need_stay_when_there_are_too_many(processors):
    pool = processors.pool
    leases = [pool.acquire("", sent(f"marker = {index}\n{COUNT}")) for index in range(16)]
    with pytest.raises(Unavailable, match="the limit") as caught:
        pool.acquire("", sent(f"marker = 16\n{COUNT}"))
    assert caught.value.code == "custom_logit_processor_queue_full"
    pool.release(leases.pop())
    late = pool.acquire("", sent(f"marker = 16\n{COUNT}"))
    for lease in (late, *leases):
        assert lease.is_settled.wait(PATIENCE_S)
        assert lease.error is None
        pool.release(lease)


def test_code_whose_place_was_given_away_while_it_was_loaded_leaves_no_process(monkeypatch, gate):
    monkeypatch.setattr(processor_pool, "MAX_WORKERS", 1)
    pool = ProcessorPool(1, VOCAB)
    try:
        left = pool.acquire("alice", ONLY)
        pool.release(left)  # its request was aborted
        wanted = pool.acquire("bob", ONLY)
        gate.set()
        assert left.is_settled.wait(PATIENCE_S)
        assert wanted.is_settled.wait(PATIENCE_S)
        assert wanted.error is None
        assert pool.supervisor.workers == [wanted.processor.worker]
        pool.release(wanted)
    finally:
        pool.close()


def test_a_preempted_sequence_finds_what_its_processor_remembered(processors):
    code = sent(f"marker = 'preempted'\n{COUNT}")
    [lease] = load(processors, [state(0, code)])
    sampler = make_sampler(2, VOCAB, processors)

    def draw(slot, position):
        return sampler.sample(make_rows(np.zeros((1, VOCAB))), [slot], [position])[0].token_id

    sampler.set_slot(state(0, code))
    drawn = [draw(0, 3 + step) for step in range(3)]
    sampler.set_slot(state(0))  # another one takes the slot
    sampler.set_slot(state(1, code, seed=2, output=drawn))  # state() adds the slot to the seed
    assert [*drawn, draw(1, 6)] == [1, 2, 3, 4]
    sampler.set_slot(state(0, code))  # one that only looks alike begins at the beginning
    assert draw(0, 3) == 1
    processors.pool.release(lease)


def test_a_sequence_that_is_preempted_before_its_forced_tokens_are_computed_goes_on_too(processors):
    body = """
p = custom_param_list[0]
p["calls"] = p.get("calls", 0) + 1
logits[:, :] = -float("inf")
logits[0, 10 * p["calls"] + len(p["__req__"].output_ids)] = 0.0
return logits
"""
    code = sent(f"marker = 'forced'\n{body}")
    [lease] = load(processors, [state(0, code)])
    sampler = make_sampler(2, VOCAB, processors)

    def draw(position):
        return sampler.sample(make_rows(np.zeros((1, VOCAB))), [0], [position])[0].token_id

    sampler.set_slot(state(0, code))
    drawn = [draw(3), draw(4)]
    sampler.set_slot(state(0))
    sampler.set_slot(state(0, code, output=(*drawn, 7, 8)))
    assert [*drawn, draw(7), draw(8)] == [10, 21, 34, 45]
    processors.pool.release(lease)


TELLS = sent("""
me = type(self)
me.seen = getattr(me, "seen", [])
me.seen += [one["__req__"].origin_input_ids[0] for one in custom_param_list]
logits[:, :] = -float("inf")
for row in range(len(custom_param_list)):
    logits[row, me.seen[0]] = 0.0
return logits
""")
"""It draws the first token of the first prompt that it ever saw."""


def test_two_clients_that_send_the_same_string_share_no_process_and_no_memory(processors):
    alice = [state(0, TELLS, client="alice", prompt=(11,)), state(1, TELLS, client="alice", prompt=(12,))]
    bob = [state(2, TELLS, client="bob", prompt=(13,))]
    leases = load(processors, alice + bob)
    assert leases[0] is leases[1]
    assert leases[0].processor.worker.pid != leases[2].processor.worker.pid
    [together] = run_steps(processors, alice + bob, 1)
    assert [row.token_id for row in together] == [11, 11, 13]
    [alone] = run_steps(processors, [state(0, TELLS, client="bob", prompt=(14,))], 1)
    assert alone[0].token_id == 13
    for lease in leases:
        processors.pool.release(lease)


def test_a_preempted_sequence_of_one_client_is_not_resumed_as_another_s(processors):
    code = sent(f"marker = 'whose'\n{COUNT}")
    leases = load(processors, [state(0, code, client=client) for client in ("alice", "bob")])
    sampler = make_sampler(1, VOCAB, processors)
    sampler.set_slot(state(0, code, client="alice"))
    drawn = sampler.sample(make_rows(np.zeros((1, VOCAB))), [0], [3])[0].token_id
    sampler.set_slot(state(0))
    sampler.set_slot(state(0, code, client="bob", output=(drawn,)))
    assert sampler.sample(make_rows(np.zeros((1, VOCAB))), [0], [4])[0].token_id == 1
    for lease in leases:
        processors.pool.release(lease)


def test_a_worker_that_no_request_needs_ends_after_a_while_and_its_memory_comes_back():
    clock = SimpleNamespace(now_s=0.0)
    pool = ProcessorPool(1, VOCAB, clock=lambda: clock.now_s)
    try:
        needed, idle = pool.acquire("alice", ONLY), pool.acquire("bob", ONLY)
        assert needed.is_settled.wait(PATIENCE_S)
        assert idle.is_settled.wait(PATIENCE_S)
        worker = idle.processor.worker
        pool.release(idle)
        clock.now_s += processor_pool.IDLE_S - 1
        pool.end_idle()
        assert len(pool.supervisor.workers) == 2
        clock.now_s += 2
        pool.end_idle()
        assert worker.is_killed
        assert pool.supervisor.workers == [needed.processor.worker]
        pool.release(needed)
    finally:
        pool.close()


def test_no_step_waits_for_a_fork_server_that_is_gone_and_its_clients_are_not_to_blame():
    pool = ProcessorPool(1, VOCAB)
    processors = CustomProcessors({}, pool)
    try:
        lease = pool.acquire("alice", ONLY)
        assert lease.is_settled.wait(PATIENCE_S)
        pool.supervisor.end_fork_server()
        one = state(0, ONLY, client="alice", params={"token_id": 3})
        [[row]] = run_steps(processors, [one], 1)
        assert row.error.status == 500
        pool.charges.check("alice")
        again = pool.acquire("alice", ONLY)
        assert again.is_settled.wait(PATIENCE_S)
        [[row]] = run_steps(processors, [one], 1)
        assert row.token_id == 3
        for each in (lease, again):
            pool.release(each)
    finally:
        processors.close()


def test_a_call_that_hangs_suspends_its_client_alone():
    ticks = itertools.count()
    pool = ProcessorPool(2, VOCAB, clock=lambda: next(ticks) / 10)
    processors = CustomProcessors({}, pool)
    try:
        steps(processors, [state(0, hanging(), client="alice")], 1)
        for _ in range(3):
            with pytest.raises(TooManyRequests, match="did not return"):
                pool.acquire("alice", hanging())
        lease = pool.acquire("bob", ONLY)
        waits = pool.take_waits()
        assert waits["alice"] > 0
        assert waits.keys() == {"alice"}
        pool.release(lease)
    finally:
        processors.close()


@pytest.fixture
def pool():
    """One of its own."""
    made = ProcessorPool(2, VOCAB)
    yield made
    made.close()


def test_who_loses_a_worker_to_somebody_outside_is_told_so_and_may_come_again(pool):
    processors = CustomProcessors({}, pool)
    one = state(0, ONLY, client="alice", params={"token_id": 3})
    [lease] = load(processors, [one])
    lease.processor.worker.lose(inline_workers.ended_from_outside)
    [[row]] = run_steps(processors, [one], 1)
    assert (row.error.status, row.error.code) == (500, "custom_logit_processor_failed")
    assert "process was killed" in row.error.message
    pool.release(lease)
    [[row]] = steps(processors, [one], 1)
    assert row.token_id == 3


def test_a_worker_that_is_killed_while_nobody_needs_it_costs_no_request(pool):
    processors = CustomProcessors({}, pool)
    one = state(0, ONLY, client="alice", params={"token_id": 3})
    [lease] = load(processors, [one])
    pool.release(lease)
    lease.processor.worker.lose(inline_workers.ended_from_outside)
    [[row]] = steps(processors, [one], 1)
    assert row.token_id == 3


def test_code_whose_process_is_killed_while_it_is_loaded_is_loaded_again_once(pool, monkeypatch):
    real_load, killed = processor_pool.RemoteProcessor.load, []

    def kill_first(processor, payload):
        if len(killed) < number:
            killed.append(processor.worker.pid)
            processor.worker.has_begun = True
            processor.worker.lose(inline_workers.ended_from_outside)
        real_load(processor, payload)

    monkeypatch.setattr(processor_pool.RemoteProcessor, "load", kill_first)
    for number, fails in ((1, False), (3, True)):
        lease = pool.acquire(f"client {number}", ONLY)
        assert lease.is_settled.wait(PATIENCE_S)
        assert (lease.error is not None) == fails
    assert not lease.error.is_rejected
    assert "process was killed" in str(lease.error)
    pool.charges.check("client 3")


def test_code_that_no_thread_can_load_is_refused_by_name_and_leaves_nothing(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Unavailable, match="could not start a thread"):
            pool.acquire("alice", ONLY)
    lease = pool.acquire("alice", ONLY)
    assert lease.is_settled.wait(PATIENCE_S)
    assert lease.error is None
    pool.release(lease)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_one_hanging_processor_after_another_costs_others_no_wait_and_is_refused_whatever_its_bytes(gate):
    clock = SimpleNamespace(now_s=0.0)
    pool = ProcessorPool(2, VOCAB, clock=lambda: clock.now_s)
    processors = CustomProcessors({}, pool)
    alice = state(0, ONLY, client="alice", params={"token_id": 3})
    gate.set()
    load(processors, [alice])
    gate.clear()
    begun, num_refused = [], 0
    for second in range(30):
        clock.now_s += 1
        try:
            begun.append(pool.acquire("bob", hanging("__init__")))
        except TooManyRequests:
            num_refused += 1
        [[row]] = run_steps(processors, [alice], 1)
        assert row.token_id == 3
        assert set(pool.take_waits()) == {"alice"}  # no step has waited for what bob has loaded
        if second == 2:
            gate.set()
            assert begun[0].is_settled.wait(PATIENCE_S)
    assert (len(begun), num_refused) == (3, 27)
    assert all(one.is_settled.wait(PATIENCE_S) and one.error.is_rejected for one in begun)
    assert "not loaded within" in str(begun[0].error)
    carol = state(0, ONLY, client="carol", params={"token_id": 5})
    [[row]] = steps(processors, [carol], 1)
    assert row.token_id == 5
    processors.close()
