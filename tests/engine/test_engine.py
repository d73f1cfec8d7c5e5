"""One request at a time: what is refused, how it ends, what it is told."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import EOS_IDS, World, expected, make_request

from tureen.contract.types import FinishReason, LogprobSpec, Usage
from tureen.engine.engine import Engine
from tureen.errors import InvalidRequest, NotFound, RequestFailed, Unavailable

EOS = EOS_IDS[0]


def _say(text):
    """A script: these characters, then EOS for ever."""
    tokens = [ord(char) for char in text]
    return lambda token, state, outputs: tokens[len(outputs)] if len(outputs) < len(tokens) else EOS


def _ends_in_repeats(tokens, shortest, longest, count):
    """Whether the last `count` pieces of some size are the same, by comparing the pieces."""
    for size in range(shortest, longest + 1):
        pieces = [tuple(tokens[len(tokens) - size * (at + 1) : len(tokens) - size * at]) for at in range(count)]
        if size * count <= len(tokens) and len(set(pieces)) == 1:
            return True
    return False


def _answer(world, request):
    world.add(request)
    world.drain()
    return world.answers[request.id]


# ---- admission


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("extra", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 40])
def test_what_fits_exactly_runs_to_its_end_and_one_token_more_is_refused(page_size, extra, max_new_tokens):
    world = World(num_pages=64 // page_size, page_size=page_size)
    num_prompt = 64 - max_new_tokens + extra
    request = make_request(token_ids=[1] * num_prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
    if extra > 0:
        with pytest.raises(InvalidRequest, match=rf"{num_prompt} tokens.*at most 64 fit.*--max-total-tokens") as error:
            world.engine.add(request)
        assert error.value.code == "context_length_exceeded"
        request = make_request(token_ids=[1], ignore_eos=True)
    assert _answer(world, request).finish == FinishReason(type="length", length=request.max_new_tokens)


def test_the_context_limits_as_the_pool_does():
    world = World(num_pages=100, page_size=16, context_len=20)
    with pytest.raises(InvalidRequest, match="at most 20 fit"):
        world.engine.add(make_request(token_ids=[1] * 17, max_new_tokens=4))
    assert _answer(world, make_request(token_ids=[1] * 16, ignore_eos=True)).finish.length == 4


def test_refused_requests_leave_no_trace():
    world = World(num_pages=4, page_size=4)
    for _ in range(100):
        with pytest.raises(InvalidRequest):
            world.engine.add(make_request(token_ids=[1] * 17))
    assert not world.engine.has_work
    world.check_idle()


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        World().engine.add(make_request(token_ids=()))


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    world = World()
    world.add(make_request("same"))
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        world.engine.add(make_request("same"))
    world.drain()
    world.check_answer("same")
    world.engine.add(make_request("same"))
    assert world.engine.step()[0].id == "same"


def test_a_full_queue_is_unavailable_until_it_moves():
    world = World(max_rows=1, max_queued=2)
    for name in "abc":  # one can run, two can wait
        world.add(make_request(name))
    with pytest.raises(Unavailable) as error:
        world.engine.add(make_request("d"))
    assert (error.value.code, error.value.retry_after_s) == ("queue_full", 1)
    world.drain()
    world.add(make_request("d"))
    world.drain()
    world.check_answers()


# ---- ends


def test_eos_ends_is_counted_and_not_in_the_text():
    answer = _answer(World(choose=_say("hi")), make_request(max_new_tokens=9))
    assert answer.finish == FinishReason(type="stop", matched=EOS)
    assert (answer.text, answer.token_ids) == ("hi", [ord("h"), ord("i"), EOS])
    assert answer.usage == Usage(3, 3, 0)


def test_eos_is_text_when_stops_are_not_trimmed():
    answer = _answer(World(choose=_say("hi")), make_request(max_new_tokens=9, no_stop_trim=True))
    assert answer.text == "hi" + chr(EOS)


def test_ignored_eos_does_not_end_but_the_same_stop_token_does():
    world = World(choose=_say("hi"))
    assert _answer(world, make_request("a", max_new_tokens=5, ignore_eos=True)).finish.type == "length"
    request = make_request("b", max_new_tokens=5, ignore_eos=True, stop_token_ids=(EOS,))
    assert _answer(world, request).finish == FinishReason(type="stop", matched=EOS)


def test_a_stop_token_ends_and_is_trimmed():
    request = make_request(max_new_tokens=9, stop_token_ids=(ord("l"),))
    answer = _answer(World(choose=_say("hello")), request)
    assert answer.finish == FinishReason(type="stop", matched=ord("l"))
    assert (answer.text, len(answer.token_ids)) == ("he", 3)


@pytest.mark.parametrize(("trim", "text"), [(False, "he"), (True, "hell")])
def test_a_stop_string_ends_over_token_borders(trim, text):
    request = make_request(max_new_tokens=9, stop=("ll",), no_stop_trim=trim)
    answer = _answer(World(choose=_say("hello")), request)
    assert answer.finish == FinishReason(type="stop", matched="ll")
    assert (answer.text, len(answer.token_ids)) == (text, 4)


def test_a_stop_string_comes_before_a_stop_token_and_both_before_length():
    request = make_request(max_new_tokens=3, stop=("el",), stop_token_ids=(ord("l"),), no_stop_trim=True)
    assert _answer(World(choose=_say("hel")), request).finish == FinishReason(type="stop", matched="el")
    request = make_request(max_new_tokens=3, stop_token_ids=(ord("l"),))
    assert _answer(World(choose=_say("hel")), request).finish.type == "stop"


def test_nothing_ends_before_min_new_tokens():
    request = make_request(max_new_tokens=9, min_new_tokens=5, stop=("h",), stop_token_ids=(ord("e"),))
    answer = _answer(World(choose=_say("hhhhhhh")), request)
    assert answer.finish == FinishReason(type="stop", matched="h")
    assert (answer.text, len(answer.token_ids)) == ("hhhh", 5)


def test_no_new_tokens_means_the_prompt_is_computed_and_scored():
    world = World(token_budget=2)
    request = make_request(token_ids=[5, 6, 7, 8, 9], max_new_tokens=0, logprobs=LogprobSpec(prompt_start=1))
    answer = _answer(world, request)
    assert answer.finish == FinishReason(type="length", length=0)
    assert (answer.token_ids, answer.text, answer.num_deltas) == ([], "", 1)
    assert [token for _, token in answer.prompt_logprobs] == [6, 7, 8, 9]
    assert world.runner.num_tokens == 5
    world.check_answers()


# ---- logprobs, usage, deltas


@pytest.mark.parametrize("num_prompt", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("token_budget", [1, 3, 4, 64])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_exact_for_every_start(num_prompt, token_budget, warm):
    for start in range(-1, num_prompt + 1):
        world = World(page_size=4, token_budget=token_budget)
        prompt = list(range(10, 10 + num_prompt))
        if warm:
            world.add(make_request("warm", prompt))
            world.drain()
        computed = world.runner.num_tokens
        world.add(make_request("r", prompt, max_new_tokens=1, logprobs=LogprobSpec(prompt_start=start)))
        world.drain()
        world.check_answers()
        answer = world.answers["r"]
        assert len(answer.prompt_logprobs) == (num_prompt - start if start >= 0 else 0)
        needed = min(num_prompt - 1, start) if 0 <= start < num_prompt - 1 else num_prompt - 1
        cached = needed // 4 * 4 if warm else 0
        assert answer.usage.cached_tokens == cached
        assert world.runner.num_tokens - computed == num_prompt - cached


def test_alternatives_and_asked_ids_pass_through():
    world = World()
    world.engine.add(make_request(logprobs=LogprobSpec(prompt_start=1, top=2, token_ids=(4, 5))))
    delta = next(delta for delta in world.engine.step())
    assert delta.prompt_logprobs[0].top is None
    assert len(delta.prompt_logprobs[1].top) == 2
    assert [token for _, token in delta.output_logprobs[0].token_ids] == [4, 5]


def test_usage_is_in_every_delta_and_prompt_logprobs_only_in_the_first():
    world = World()
    world.engine.add(make_request(ignore_eos=True, logprobs=LogprobSpec(prompt_start=0)))
    deltas = []
    while world.engine.has_work:
        deltas += world.engine.step()
    assert [delta.usage for delta in deltas] == [Usage(3, count, 0) for count in (1, 2, 3, 4)]
    assert [len(delta.prompt_logprobs) for delta in deltas] == [3, 0, 0, 0]
    assert [delta.finish is not None for delta in deltas] == [False, False, False, True]


@pytest.mark.parametrize(("asks", "first"), [(True, [(4, 0), (8, 0)]), (False, [])])
def test_progress_of_a_prompt_is_reported_until_its_first_token_if_the_request_asks_for_it(asks, first):
    world = World(token_budget=4)
    request = make_request(token_ids=range(3, 12), max_new_tokens=2, ignore_eos=True)
    world.add(msgspec.structs.replace(request, reports_progress=asks))
    deltas = []
    while world.engine.has_work:
        deltas += world.step()
    assert [(delta.usage.computed_tokens, len(delta.token_ids)) for delta in deltas] == [*first, (0, 1), (0, 1)]


# ---- abort, call, stats


def test_an_abort_ends_once_and_an_unknown_id_is_nobody():
    world = World()
    world.add(make_request("a", ignore_eos=True, max_new_tokens=50))
    world.step()
    world.engine.abort("a", "deadline")
    world.engine.abort("a")
    world.engine.abort("nobody")
    assert world.engine.has_work
    assert world.engine.scheduler.running == []
    world.drain()
    assert world.answers["a"].finish == FinishReason(type="abort", message="Aborted", reason="deadline")
    assert world.answers["a"].usage.output_tokens == 1


def test_an_abort_gives_the_text_that_was_held_back():
    world = World(choose=_say("hello"))
    world.add(make_request(stop=("lloX",), max_new_tokens=50))
    for _ in range(4):
        world.step()
    assert world.answers["r"].text == "he"
    world.engine.abort("r")
    world.drain()
    assert world.answers["r"].text == "hell"


def test_the_cache_is_flushed_only_when_nothing_runs():
    world = World(page_size=4)
    world.add(make_request(token_ids=range(9)))
    world.step()
    with pytest.raises(InvalidRequest, match="while 1 request"):
        world.engine.call("flush_cache")
    world.drain()
    cached = world.engine.call("stats").num_cached_pages
    assert cached >= 2
    assert world.engine.call("flush_cache") == cached
    assert world.engine.call("flush_cache") == 0
    world.add(make_request("again", token_ids=range(9)))  # what was stored of these is gone
    world.drain()
    world.check_answers()


def test_unknown_operations_are_not_found():
    for op in ("_run", "step", "add", "nonsense"):
        with pytest.raises(NotFound, match="unknown operation"):
            World().engine.call(op)


def test_totals_are_the_sum_of_what_clients_were_told():
    world = World(page_size=4)
    for index in range(6):
        world.add(make_request(f"r{index}", [1] * 10 + [index], seed=index))
        world.step()
    world.drain()
    usages = [answer.usage for answer in world.answers.values()]
    stats = world.engine.stats()
    assert stats.total_prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert stats.total_cached_tokens == sum(usage.cached_tokens for usage in usages) > 0
    assert stats.total_output_tokens == sum(usage.output_tokens for usage in usages)
    assert (stats.num_running, stats.num_queued, stats.total_steps) == (0, 0, world.runner.num_calls)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


# ---- faults of one request


def test_a_detokenizer_that_raises_fails_its_request_only(monkeypatch):
    world = World(page_size=2)
    world.add(make_request("good", [1, 2, 3, 4, 5]))
    world.add(make_request("bad", [6, 7, 8, 9, 10]))

    def explode(token_id, *, stops_allowed):
        raise RequestFailed("no")

    monkeypatch.setattr(world.engine._sequences["bad"].detokenizer, "append", explode, raising=False)
    world.drain()
    world.check_answer("good")
    finish = world.answers["bad"].finish
    assert (finish.type, finish.status, finish.code) == ("error", 500, "request_failed")
    assert world.engine.cache.match(("", ""), [6, 7, 8, 9, 10], 5) == []
    assert len(world.engine.cache.match(("", ""), [1, 2, 3, 4, 5], 5)) == 2


def test_the_oracle_is_not_the_runner():
    """The expected answers are computed from tokens alone; a change of seed, prompt or history changes them."""
    base = expected(make_request(temperature=1.0, max_new_tokens=8, ignore_eos=True), 100)[0]
    assert base != expected(make_request(temperature=1.0, max_new_tokens=8, ignore_eos=True, seed=1), 100)[0]
    assert base != expected(make_request(token_ids=(1, 2, 4), temperature=1.0, max_new_tokens=8), 100)[0]
    assert isinstance(World().engine, Engine)


# ---- outputs that repeat themselves


@given(
    text=st.text("ab", min_size=24, max_size=24),
    shortest=st.integers(0, 3),
    more=st.integers(0, 4),
    count=st.integers(2, 5),
    least=st.sampled_from([0, 9]),
)
@settings(max_examples=60, deadline=None)
def test_an_output_that_repeats_itself_ends(text, shortest, more, count, least):
    sent = {"min_pattern_size": shortest, "max_pattern_size": max(1, shortest) + more, "min_count": count}
    request = make_request(max_new_tokens=24, min_new_tokens=least, repetition_detection=sent)
    answer = _answer(World(choose=_say(text)), request)
    tokens = [ord(char) for char in text]
    bounds = (max(1, shortest), max(1, shortest) + more, count)
    end = next((at for at in range(max(1, least), 24) if _ends_in_repeats(tokens[:at], *bounds)), None)
    assert answer.token_ids == tokens[:end]
    if end is None:
        assert answer.finish == FinishReason(type="length", length=24)
    else:
        assert answer.finish == FinishReason(type="stop", matched="repetition_detected", reason="repetition")


@pytest.mark.parametrize("sent", [None, {}, {"max_pattern_size": 0, "min_count": 2}])
def test_repetition_that_is_not_looked_for_ends_nothing(sent):
    request = make_request(max_new_tokens=9, repetition_detection=sent)
    assert _answer(World(choose=_say("a" * 9)), request).finish.type == "length"


class CountedReads(list):
    """A list that counts the entries that are read."""

    num_read = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.num_read += len(found) if isinstance(where, slice) else 1
        return found


def test_each_token_is_compared_once_with_those_one_pattern_before_it():
    text = "".join("aaa" + random.Random(at).choice("bcdefgh") for at in range(60))

    def num_read(sent):
        world = World(choose=_say(text), num_pages=100)
        world.add(make_request(max_new_tokens=240, repetition_detection=sent))
        world.step()
        [sequence] = world.engine.scheduler.running
        tokens = sequence.token_ids = CountedReads(sequence.token_ids)
        world.drain()
        assert world.answers["r"].finish.type == "length"
        return tokens.num_read

    assert num_read({"max_pattern_size": 60, "min_count": 4}) - num_read(None) <= 240 * (60 + 1)
