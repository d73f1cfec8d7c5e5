"""Adapters in the engine: nothing that was cached for one is read for another, and none goes while it is in use."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from toy_grammar import BROKEN
from world import World, expected, make_request

from tureen.errors import Conflict, InvalidRequest, NotFound, RequestFailed
from tureen.grammar.base import GrammarSpec

PROMPT = tuple(range(10, 30))  # five pages


def _make(request_id, adapter="", *, token_ids=PROMPT, **how):
    return msgspec.structs.replace(make_request(request_id, token_ids, ignore_eos=True, **how), adapter=adapter)


def _run(world, *requests):
    for request in requests:
        world.add(request)
    world.drain()
    return [world.answers[request.id] for request in requests]


def _unload(world, name):
    return world.engine.call("unload_adapter", name=name)


def _load(world, name, path=None):
    return world.engine.call("load_adapter", name=name, path=path or name)


def _expected(request, number):
    return expected(request, 10_000, number)[0]


# ---- the prefix cache


def test_a_cached_prefix_is_reused_by_the_same_adapter_alone():
    world = World()
    for index, (adapter, cached) in enumerate([("", 0), ("red", 0), ("blue", 0), ("red", 16), ("", 16), ("blue", 16)]):
        request = _make(f"r{index}", adapter)
        [answer] = _run(world, request)
        assert answer.usage.cached_tokens == cached, (index, adapter)
        assert answer.token_ids == _expected(request, ("", "red", "blue").index(adapter))


def test_requests_that_arrive_together_share_with_their_own_adapter_alone():
    world = World(token_budget=200)
    names = ["", "red", "blue"] * 2
    requests = [_make(f"r{index}", name) for index, name in enumerate(names)]
    answers = _run(world, *requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == _expected(request, ("", "red", "blue").index(request.adapter))
    assert sorted(answer.usage.cached_tokens for answer in answers) == [0, 0, 0, 16, 16, 16]


def test_what_was_cached_is_not_read_after_another_version_was_loaded_under_the_name():
    world = World()
    request = _make("r1", "red")
    assert _run(world, request)[0].token_ids == _expected(request, 1)
    _unload(world, "red")
    _load(world, "red", "another folder")
    for name, cached in (("r2", 0), ("r3", 16)):
        request = _make(name, "red")
        [answer] = _run(world, request)
        assert (answer.usage.cached_tokens, answer.token_ids) == (cached, _expected(request, 3))


def test_a_number_is_not_used_again_even_where_loading_failed(monkeypatch):
    world = World()
    call = world.runner.call
    numbers = []

    def note(op, **args):
        numbers.append(args["number"])
        if args.get("path") == "broken":
            raise InvalidRequest("broken", field="lora_path", code="invalid_adapter")
        return call(op, **args)

    monkeypatch.setattr(world.runner, "call", note)
    with pytest.raises(InvalidRequest, match="broken"):
        _load(world, "green", "broken")
    with pytest.raises(NotFound):
        world.engine.add(_make("r", "green"))
    assert _load(world, "green") == {"red": "red", "blue": "blue", "green": "green"}
    _unload(world, "green")
    _load(world, "green")
    assert numbers == [3, 4, 4, 5]


def test_an_adapter_and_a_salt_of_the_same_spelling_are_told_apart():
    world = World()
    _run(world, _make("r1", "red"), _make("r2", cache_salt="1"), _make("r3", cache_salt="red"))
    assert all(answer.usage.cached_tokens == 0 for answer in world.answers.values())


# ---- names


@pytest.mark.parametrize("name", ["nobody", "Red", "red ", "1", "../../etc/passwd", "http://a.example", "x" * 10_000])
def test_an_unknown_name_is_a_404_and_leaves_nothing_behind(name):
    world = World()
    with pytest.raises(NotFound, match="lora_path") as caught:
        world.engine.add(_make("r", name))
    assert (caught.value.status, caught.value.code, caught.value.field) == (404, "lora_not_found", "lora_path")
    assert len(caught.value.message) < 300
    world.check_idle()
    _run(world, _make("r", "red"))


def test_a_path_names_the_adapter_that_was_loaded_from_it():
    world = World()
    _load(world, "green", "/adapters/green")
    request = _make("r", "/adapters/green")
    assert _run(world, request)[0].token_ids == _expected(request, 3)
    with pytest.raises(NotFound):
        world.engine.add(_make("s", "/adapters/../adapters/green"))
    _load(world, "/adapters/green", "elsewhere")  # a name comes before a path
    request = _make("t", "/adapters/green")
    assert _run(world, request)[0].token_ids == _expected(request, 4)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\0", "\x7f"])
def test_a_name_that_cannot_be_shown_is_refused(name):
    with pytest.raises(InvalidRequest, match="lora_name must be 1 to 256 printable") as caught:
        _load(World(), name)
    assert caught.value.field == "lora_name"


def test_a_name_that_is_taken_is_refused_and_the_one_that_has_it_stays():
    world = World()
    with pytest.raises(InvalidRequest, match="is already loaded; unload it first"):
        _load(world, "red", "another folder")
    request = _make("r", "red")
    assert _run(world, request)[0].token_ids == _expected(request, 1)


def test_unloading_what_is_not_loaded_is_a_404():
    world = World()
    with pytest.raises(NotFound, match="lora_name 'green'") as caught:
        _unload(world, "green")
    assert (caught.value.code, caught.value.field) == ("lora_not_found", "lora_name")
    assert _unload(world, "red") == {"blue": "blue"}
    with pytest.raises(NotFound):
        _unload(world, "red")
    with pytest.raises(NotFound):
        world.engine.add(_make("r", "red"))


# ---- in use


def _check_in_use(world, num_users, name="red"):
    with pytest.raises(Conflict, match=f"{num_users} requests use it") as caught:
        _unload(world, name)
    assert (caught.value.status, caught.value.code, caught.value.field) == (409, "lora_in_use", "lora_name")


def test_an_adapter_in_use_stays_until_its_last_request_has_ended():
    world = World(max_rows=1)
    short, long = _make("short", "red", max_new_tokens=1), _make("long", "red", max_new_tokens=9, seed=1)
    world.add(short)
    world.add(long)  # it waits for the slot
    _check_in_use(world, 2)
    while "short" not in world.ended:
        world.step()
    _check_in_use(world, 1)
    assert _unload(world, "blue") == {"red": "red"}
    world.drain()
    assert world.answers["long"].token_ids == _expected(long, 1)
    assert _unload(world, "red") == {}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("end", ["abort", "pause"])
def test_an_aborted_request_uses_its_adapter_no_more(num_steps, end):
    world = World()
    world.add(_make("r", "red", max_new_tokens=20))
    for _ in range(num_steps):
        world.step()
    _check_in_use(world, 1)
    if end == "abort":
        world.engine.abort("r")
        world.engine.abort("r")
    else:
        world.engine.control.pause("abort")
        world.engine.control.resume()
    assert _unload(world, "red") == {"blue": "blue"}
    world.drain()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_still_uses_its_adapter(mode):
    world = World()
    request = _make("r", "red", max_new_tokens=20)
    world.add(request)
    for _ in range(3):
        world.step()
    world.engine.control.pause(mode)
    _check_in_use(world, 1)
    world.engine.control.resume()
    world.drain()
    assert world.answers["r"].token_ids == _expected(request, 1)
    _unload(world, "red")


def test_a_request_whose_grammar_is_refused_uses_its_adapter_no_more():
    world = World()
    request = _make("r", "red")
    world.add(msgspec.structs.replace(request, grammar=GrammarSpec("regex", BROKEN), grammar_field="regex"))
    _check_in_use(world, 1)
    world.drain()
    assert world.answers["r"].finish.type == "error"
    _unload(world, "red")


def test_a_request_that_cannot_be_added_uses_no_adapter(monkeypatch):
    world = World()
    monkeypatch.setattr(world.compiler, "submit", lambda spec: 1 / 0)
    request = msgspec.structs.replace(_make("r", "red"), grammar=GrammarSpec("regex", "g1 2"), grammar_field="regex")
    with pytest.raises(ZeroDivisionError):
        world.engine.add(request)
    _unload(world, "red")


@pytest.mark.parametrize("fault", ["poison", "raise"])
def test_a_request_that_fails_uses_its_adapter_no_more(fault):
    world = World(fault=lambda call, row: fault if call >= 2 else None)
    world.add(_make("r", "red", max_new_tokens=20))
    with contextlib.suppress(RequestFailed):
        world.drain()
    assert world.answers["r"].finish.type == "error"
    _unload(world, "red")


def test_preempted_requests_go_on_with_their_adapters():
    world = World(num_pages=9, page_size=4, token_budget=64)
    requests = [
        _make(f"r{index}", name, token_ids=PROMPT[:9], max_new_tokens=11, seed=index)
        for index, name in enumerate(["red", "", "blue", "red"])
    ]
    answers = _run(world, *requests)
    assert world.engine.stats().total_preemptions > 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == _expected(request, ("", "red", "blue").index(request.adapter))
