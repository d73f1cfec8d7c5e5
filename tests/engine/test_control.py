"""Exchanging weights and giving memory back, in an engine whose runner's numbers depend on the weights."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from world import World, _hidden, expected, make_request

from tureen.contract.types import LogprobSpec
from tureen.engine.control import RELEASED_RETRY_S
from tureen.errors import Conflict, Unavailable

OTHER = 7
"""The number of other weights; the oracle computes with them."""


def _make(request_id, count=12, prompt=range(10, 30)):
    return make_request(request_id, tuple(prompt), ignore_eos=True, max_new_tokens=count)


def _expected(request, weights=0):
    return expected(request, 10_000, weights)[0]


def _run(world, request):
    world.add(request)
    world.drain()
    return world.answers[request.id]


def test_nothing_that_other_weights_computed_is_used():
    world = World()
    for index, weights in enumerate((0, OTHER, 0)):
        if index:
            assert world.engine.call("update_weights", number=weights) == 0
        request = _make(f"r{index}")
        answer = _run(world, request)
        assert (answer.token_ids, answer.usage.cached_tokens) == (_expected(request, weights), 0)


def test_weights_are_not_exchanged_under_a_request_that_runs():
    world = World()
    request = _make("r")
    world.add(request)
    world.step()
    with pytest.raises(Conflict):
        world.engine.call("update_weights", number=OTHER)
    world.drain()
    assert world.answers["r"].token_ids == _expected(request)


def test_whoever_has_begun_ends_under_a_hold_preempted_or_not_and_nobody_new_begins():
    world = World(num_pages=16, token_budget=64)
    begun = [_make(f"old{index}", 30, range(index, index + 6)) for index in range(4)]  # more than fits: 4 * 9 pages
    for request in begun:
        world.add(request)
    while world.engine.stats().total_preemptions == 0:
        world.step()
    assert world.engine.call("hold") == 4
    late = _make("late")
    world.add(late)
    while world.engine.has_work:
        world.step()
    assert [world.answers[request.id].token_ids for request in begun] == [_expected(request) for request in begun]
    assert (world.engine.call("hold"), world.answers["late"].token_ids) == (0, [])
    world.engine.call("update_weights", number=OTHER)
    world.engine.call("let_go")
    world.drain()
    assert world.answers["late"].token_ids == _expected(late, OTHER)


def test_a_held_engine_can_end_a_request_that_waits():
    world = World()
    world.engine.call("hold")
    world.add(_make("r"))
    assert not world.engine.has_work
    world.engine.abort("r")
    world.step()
    assert world.answers["r"].finish.type == "abort"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_is_paused_is_computed_again_by_the_new_weights(mode):
    world = World()
    world.add(_make("r"))
    while not world.answers["r"].token_ids:
        world.step()
    world.engine.call("pause", mode=mode)
    assert world.engine.call("update_weights", number=OTHER) == 1
    before, tokens = world.runner.num_tokens, len(world.answers["r"].token_ids)
    world.engine.call("resume")
    world.step()
    assert world.runner.num_tokens - before == 20 + tokens


def _update_paused(world, mode="retract"):
    world.engine.call("pause", mode=mode)
    num_paused = world.engine.call("update_weights", number=OTHER)
    world.engine.call("resume")
    world.drain()
    return num_paused


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("wanted", ["all", "pooled", "last", "scores"])
def test_a_prompt_that_is_half_computed_is_told_of_by_the_new_weights_alone(wanted, mode):
    world = World(token_budget=8)
    if wanted == "scores":
        request = msgspec.structs.replace(_make("r", 2), logprobs=LogprobSpec(prompt_start=3))
    else:
        request = msgspec.structs.replace(_make("r", 0 if wanted == "pooled" else 2), hidden_states=wanted)
    world.add(request)
    world.step()
    assert _update_paused(world, mode) == 1
    tokens, _, logprobs, scored, stored = expected(request, 10_000, OTHER)
    states = _hidden(stored[: 20 + (request.max_new_tokens > 0)])
    answer = world.answers["r"]
    assert (answer.token_ids, answer.finish.type) == (tokens, "length")
    if wanted == "pooled":
        mean = np.frombuffer(b"".join(states), np.float32).astype(np.float64).mean()
        assert np.frombuffer(b"".join(answer.hidden_states), np.float32) == pytest.approx([mean])
    else:
        assert answer.hidden_states == {"all": states, "last": states[-1:], "scores": []}[wanted]
        assert answer.prompt_logprobs == scored
        assert answer.logprobs == (logprobs if wanted == "scores" else [])


@pytest.mark.parametrize("wanted", ["all", "scores", "last", "drawn", "nothing to score"])
def test_only_what_has_told_of_its_prompt_already_ends_when_the_weights_change(wanted):
    start = {"scores": 3, "nothing to score": 19}.get(wanted, -1)
    scores = LogprobSpec(prompt_start=start) if wanted in ("scores", "drawn", "nothing to score") else None
    hidden_states = wanted if wanted in ("all", "last") else "none"
    world = World()
    world.add(msgspec.structs.replace(_make("r"), logprobs=scores, hidden_states=hidden_states))
    world.add(_make("other", prompt=range(30, 50)))
    while not world.answers["r"].token_ids:
        world.step()
    is_mixed = wanted in ("all", "scores")
    assert _update_paused(world) == (1 if is_mixed else 2)
    finish = world.answers["r"].finish
    assert (finish.type, finish.reason) == (("abort", "weights") if is_mixed else ("length", None))
    assert world.answers["other"].finish.type == "length"


def test_what_needs_the_memory_that_is_away_is_refused_with_a_time():
    world = World()
    world.engine.call("release_memory", tags=["weights"])
    for op in ("weight", "start_profile"):
        with pytest.raises(Unavailable) as refused:
            world.engine.call(op)
        assert (refused.value.code, refused.value.retry_after_s) == ("memory_released", RELEASED_RETRY_S)
    world.engine.call("resume_memory", tags=["weights"])
    assert world.engine.call("start_profile") == "fake.trace.json"


def test_nothing_is_taken_while_memory_is_away_and_all_is_as_before_then():
    world = World()
    first = _run(world, _make("a"))
    world.engine.call("release_memory", tags=["kv_cache", "weights"])
    for back in (["weights"], ["kv_cache"]):
        with pytest.raises(Unavailable, match="/resume_memory_occupation"):
            world.engine.add(_make("b"))
        world.engine.call("resume_memory", tags=back)
    again = _run(world, _make("c"))
    assert (again.token_ids, again.usage.cached_tokens) == (first.token_ids, 0)


@pytest.mark.parametrize("is_paused", [False, True])
def test_memory_is_not_given_back_under_a_request(is_paused):
    world = World()
    request = _make("r")
    world.add(request)
    if is_paused:
        world.engine.call("pause", mode="retract")
    with pytest.raises(Conflict, match="1 requests are running"):
        world.engine.call("release_memory", tags=["kv_cache"])
    world.engine.call("resume")
    world.drain()
    assert world.answers["r"].token_ids == _expected(request)


def test_other_weights_bring_released_ones_back():
    world = World()
    world.engine.call("release_memory", tags=["weights"])
    world.engine.call("update_weights", number=OTHER)
    request = _make("r")
    assert _run(world, request).token_ids == _expected(request, OTHER)
