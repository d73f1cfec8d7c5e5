"""What requests with custom logit processors may not do to each other, and what outlives a step."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from arithmetics import make_array, make_rows, make_sampler
from patience import wait_until
from test_custom_processors import VOCAB, another, applied, sent, state, steps

from tureen.jail import pool
from tureen.jail.pool import Jail
from tureen.logit_processor import CustomLogitProcessor
from tureen.sampling.custom import CustomProcessors, load_registered

pytestmark = pytest.mark.usefixtures("patient_jail", "each_arithmetic")

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
def processors():
    made = CustomProcessors(load_registered(()), Jail(20, VOCAB))
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
    start = pool.Worker.start

    def break_off(worker, logits, sequences):
        if len(sequences) == 2:
            raise RuntimeError
        start(worker, logits, sequences)

    other = sent("return logits")
    rows = [state(0, ONLY, params={"token_id": 11}), state(1, other), state(2, other)]
    with monkeypatch.context() as patch:
        patch.setattr(pool.Worker, "start", break_off)
        with pytest.raises(RuntimeError):
            steps(processors, rows, 1)
    assert [only(processors, token_id) for token_id in (20, 21, 22)] == [20, 21, 22]


def test_a_reply_made_up_beforehand_ends_the_worker(processors):
    body = """
import os
from tureen.jail import wire
for descriptor in range(64):
    for number in range(10):
        try: os.write(descriptor, wire.reply(number, wire.DONE))
        except OSError: pass
return logits
"""
    first, second = steps(processors, [state(0, sent(f"marker = {next(another)}\n{body}"))], 2)
    assert "out of turn" in (first[0].error or second[0].error).message
    assert only(processors, 8) == 8


def hanging(where, index):
    """A payload whose class hangs in this method."""
    scope = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(
        f"class Mine(CustomLogitProcessor):\n    marker = {next(another)}, {index}\n"
        f"    def {where}(self, *given):\n        while True: pass\n",
        scope,
    )
    return scope["Mine"].to_str()


@pytest.mark.parametrize("where", ["__init__", "__call__"])
def test_many_that_hang_hold_up_a_step_no_longer_than_one(processors, monkeypatch, where):
    waited = []
    await_reply = pool.Worker._await

    def noting(worker, until_s, late):
        waited.append(until_s)
        await_reply(worker, until_s, late)

    monkeypatch.setattr(pool.Worker, "_await", noting)
    monkeypatch.setattr(pool, "LOAD_TIMEOUT_S", 2.0 if where == "__init__" else 120.0)
    monkeypatch.setattr(pool, "CALL_TIMEOUT_S", 1.0)
    [found] = steps(processors, [state(index, hanging(where, index)) for index in range(4)], 1)
    assert all("within" in row.error.message for row in found)
    assert len(set(waited)) == (1 if where == "__init__" else 2)  # one moment for all loads, one for all calls


def test_the_processors_that_run_already_stay_when_there_are_too_many(processors):
    sampler = make_sampler(17, VOCAB, processors)
    codes = [sent(f"marker = {index}\n{COUNT}") for index in range(17)]
    for index in range(16):
        sampler.set_slot(state(index, codes[index]))
    for step in range(2):
        found = sampler.sample(make_rows(np.zeros((16, VOCAB))), range(16), [3 + step] * 16)
        assert [row.token_id for row in found] == [1 + step] * 16
    sampler.set_slot(state(16, codes[16]))
    newcomer, *running = sampler.sample(make_rows(np.zeros((17, VOCAB))), [16, *range(16)], [3] + [5] * 16)
    assert "the most there may be" in newcomer.error.message
    assert [row.token_id for row in running] == [3] * 16


def test_a_preempted_sequence_finds_what_its_processor_remembered(processors):
    code = sent(f"marker = 'preempted'\n{COUNT}")
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


def test_a_sequence_that_is_preempted_before_its_forced_tokens_are_computed_goes_on_too(processors):
    body = """
p = custom_param_list[0]
p["calls"] = p.get("calls", 0) + 1
logits[:, :] = -float("inf")
logits[0, 10 * p["calls"] + len(p["__req__"].output_ids)] = 0.0
return logits
"""
    code = sent(f"marker = 'forced'\n{body}")
    sampler = make_sampler(2, VOCAB, processors)

    def draw(position):
        return sampler.sample(make_rows(np.zeros((1, VOCAB))), [0], [position])[0].token_id

    sampler.set_slot(state(0, code))
    drawn = [draw(3), draw(4)]
    sampler.set_slot(state(0))
    sampler.set_slot(state(0, code, output=(*drawn, 7, 8)))
    assert [*drawn, draw(7), draw(8)] == [10, 21, 34, 45]


@pytest.mark.parametrize(
    "body",
    [
        "m = np.ones((400, 400))\nlogits += float((m @ m)[0, 0]) - 399\nreturn logits",
        "np.linalg.svd(np.ones((60, 60)))\nlogits += float(np.random.default_rng(0).integers(1, 2))\nreturn logits",
        "import sys\nsys.stdout.write('x')\nprint('y', flush=True)\nlogits += 1\nreturn logits",
    ],
)
def test_numpy_and_printing_work_in_the_jail(processors, body):
    logits = make_rows(np.zeros((1, VOCAB)))
    assert applied(processors, logits, [processors.start(state(0, sent(body)))]) == {}
    assert np.array_equal(make_array(logits), np.ones((1, VOCAB)))


def test_a_worker_cannot_compute_on_when_its_call_is_over(processors):
    body = """
import os, signal
from tureen.jail import wire
for number in (signal.SIGXCPU, signal.SIGPROF):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
try: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])
except OSError: pass
for descriptor in range(64):
    try: os.write(descriptor, wire.reply(1, wire.DONE))
    except OSError: pass
while True: pass
"""
    steps(processors, [state(0, sent(f"marker = {next(another)}\n{body}"))], 1)
    [*_, worker] = processors._jail._workers.values()
    wait_until(lambda: not _is_alive(worker.pid), "the worker's end")


def test_a_processor_that_is_used_for_long_gets_the_time_it_needs():
    made = CustomProcessors({}, Jail(1, VOCAB))
    body = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nreturn logits"
    try:
        found = steps(made, [state(0, sent(body))], 14)  # 7 s; 5 are allowed at first
        assert [step[0].error for step in found] == [None] * 14
    finally:
        made.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_stops_the_server_does_not_stop_the_jail_before_it(processors, number):
    zygote = processors._jail._zygote.pid
    assert os.getpgid(zygote) != os.getpgid(0)
    os.kill(zygote, number)
    for worker in processors._jail._workers.values():
        os.kill(worker.pid, number)
    fresh = sent(f"marker = {next(another)}\nlogits[:, :] = -float('inf')\nlogits[0, 9] = 0.0\nreturn logits")
    [[row]] = steps(processors, [state(0, fresh)], 1)
    assert row.token_id == 9
    assert only(processors, 7) == 7


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
