"""Exchanging weights and giving memory back, in an engine whose runner's numbers depend on the weights."""

from __future__ import annotations

import pytest
from world import World, expected, make_request

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
    with pytest.raises(Conflict, match="1 requests have not ended"):
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
