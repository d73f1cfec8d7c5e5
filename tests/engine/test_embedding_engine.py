"""The engine of a model that makes embeddings: whose turn it is, what is refused, and how requests end."""

from __future__ import annotations

import struct

import pytest
from byte_tokenizer import make_byte_tokenizer

from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest
from tureen.engine.embedding import MAX_FAILED, EmbeddingEngine
from tureen.engine.queue import Schedule
from tureen.errors import InvalidRequest, NotFound, RequestFailed, Unavailable

MAX_TOKENS = 8
REFUSED, BROKEN = 200, 201


class _Sums:
    """Makes vectors of the sums of the tokens, and notes the order."""

    def __init__(self):
        self.seen = []
        self.sizes = []

    def embed(self, texts):
        self.sizes.append(len(texts))
        self.seen += [tuple(text.token_ids) for text in texts]
        return [self._embed(tuple(text.token_ids)) for text in texts]

    def _embed(self, token_ids):
        if REFUSED in token_ids:
            return RequestFailed("not a number")
        if BROKEN in token_ids:
            raise RuntimeError("the device is gone")
        return struct.pack("<f", sum(token_ids))


def _make_engine(*, budget=4, max_queued=100, **schedule):
    embedder = _Sums()
    engine = EmbeddingEngine(
        embedder,
        make_byte_tokenizer(),
        max_tokens=MAX_TOKENS,
        max_queued=max_queued,
        token_budget=budget,
        schedule=Schedule(**schedule),
    )
    return engine, embedder


def _make_request(name, *token_ids, max_new_tokens=0, hidden_states="pooled", **fields):
    return GenerateRequest(
        id=name,
        token_ids=token_ids,
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        seed=0,
        hidden_states=hidden_states,
        **fields,
    )


def _finished(engine):
    """Id -> delta of everything that is waiting."""
    found = {}
    while engine.has_work:
        found |= {delta.id: delta for delta in engine.step()}
    return found


def test_each_request_gets_the_vector_of_its_own_text_and_its_usage():
    engine, _ = _make_engine()
    for number in range(5):
        engine.add(_make_request(f"r{number}", number, 10))
    found = _finished(engine)
    assert [struct.unpack("<f", found[f"r{n}"].hidden_states[0])[0] for n in range(5)] == [10, 11, 12, 13, 14]
    assert {delta.finish.type for delta in found.values()} == {"length"}
    assert found["r0"].usage.prompt_tokens == 2
    assert not engine.has_work


def test_a_step_takes_as_many_texts_as_fit_its_budget_and_a_longer_one_alone():
    engine, embedder = _make_engine(budget=4)
    for name, length in (("a", 2), ("b", 2), ("c", 6), ("d", 1)):
        engine.add(_make_request(name, *range(length)))
    sizes = []
    while engine.has_work:
        before = len(embedder.seen)
        engine.step()
        sizes.append([len(text) for text in embedder.seen[before:]])
    assert sizes == [[2, 2], [6], [1]]
    assert embedder.sizes == [2, 1, 1]  # together


def test_an_aborted_request_is_not_computed_and_hears_of_its_end_once():
    engine, embedder = _make_engine()
    engine.add(_make_request("a", 1))
    engine.add(_make_request("b", 2))
    engine.abort("a", "deadline")
    engine.abort("a")
    engine.abort("nobody")
    found = _finished(engine)
    assert found["a"].finish.reason == "deadline"
    assert found["a"].hidden_states == ()
    assert embedder.seen == [(2,)]


@pytest.mark.parametrize(
    "request_",
    [
        _make_request("x", 1, max_new_tokens=3),
        _make_request("x", 1, hidden_states="none"),
        _make_request("x", 1, hidden_states="all"),
        _make_request("x", -1, embeds=b"\0\0\0\0"),
        _make_request("x"),
        _make_request("x", *range(MAX_TOKENS + 1)),
    ],
)
def test_what_it_can_never_do_is_refused(request_):
    engine, _ = _make_engine()
    with pytest.raises(InvalidRequest):
        engine.add(request_)
    assert not engine.has_work


def test_no_more_requests_wait_than_may():
    engine, _ = _make_engine(max_queued=2)
    engine.add(_make_request("a", 1))
    engine.add(_make_request("b", 1))
    engine.add(_make_request("c", 1))  # one of them runs
    with pytest.raises(Unavailable):
        engine.add(_make_request("d", 1))
    engine.step()
    engine.add(_make_request("d", 1))


def test_higher_priority_comes_first_where_priorities_count():
    for by_priority, expected in ((True, [(2,), (1,), (3,)]), (False, [(1,), (2,), (3,)])):
        engine, embedder = _make_engine(budget=1, by_priority=by_priority)
        for token_id, priority in ((1, 0), (2, 5), (3, 0)):
            engine.add(_make_request(f"r{token_id}", token_id, priority=priority))
        _finished(engine)
        assert embedder.seen == expected


def test_clients_that_wait_at_the_same_time_take_turns_where_the_schedule_is_fair():
    engine, embedder = _make_engine(budget=1, policy="fair")
    for token_id in (1, 2, 3):
        engine.add(_make_request(f"a{token_id}", token_id, client="a"))
    engine.add(_make_request("b", 9, client="b"))
    _finished(engine)
    assert (9,) in embedder.seen[:2]


def test_a_text_that_fails_ends_its_own_request_only():
    engine, _ = _make_engine(budget=100)
    for name, token_id in (("a", 1), ("refused", REFUSED), ("broken", BROKEN), ("b", 2)):
        engine.add(_make_request(name, token_id))
    found = _finished(engine)
    assert [found[name].finish.type for name in ("a", "refused", "broken", "b")] == [
        "length",
        "error",
        "error",
        "length",
    ]
    assert "device" not in found["broken"].finish.message


def test_texts_beside_one_without_finite_numbers_are_computed_once():
    engine, embedder = _make_engine(budget=100)
    for name, token_id in (("a", 1), ("refused", REFUSED), ("b", 2)):
        engine.add(_make_request(name, token_id))
    assert _finished(engine)["refused"].finish.type == "error"
    assert embedder.sizes == [3]


def test_a_device_on_which_every_text_fails_ends_the_engine():
    engine, _ = _make_engine(budget=100)
    for number in range(MAX_FAILED):
        engine.add(_make_request(f"r{number}", BROKEN))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


def test_a_paused_engine_computes_nothing_until_it_resumes():
    engine, embedder = _make_engine()
    engine.add(_make_request("a", 1))
    assert engine.call("pause", mode="in_place") == 1
    assert not engine.has_work
    assert engine.call("stats").num_queued == 1
    engine.call("resume")
    assert _finished(engine)["a"].finish.type == "length"
    engine.add(_make_request("b", 2))
    engine.call("pause", mode="abort")
    assert _finished(engine)["b"].finish.reason == "pause"
    assert embedder.seen == [(1,)]


def test_an_operation_that_such_a_model_does_not_have_is_not_found():
    engine, _ = _make_engine()
    assert engine.call("flush_cache") == 0
    with pytest.raises(NotFound, match="load_adapter"):
        engine.call("load_adapter", name="a", path="b")


def test_texts_that_are_computed_when_idle_have_steps_of_their_own_and_take_no_place_in_the_queue():
    engine, embedder = _make_engine(budget=8, max_queued=1)
    for index in range(4):
        engine.add(_make_request(f"idle{index}", index, when_idle=True))
    engine.add(_make_request("a", 10))
    engine.add(_make_request("b", 11))
    with pytest.raises(Unavailable):
        engine.add(_make_request("c", 12))
    engine.step()
    assert embedder.seen == [(10,), (11,)]
    engine.step()
    assert embedder.seen[2:] == [(0,), (1,), (2,), (3,)]
