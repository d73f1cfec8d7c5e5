"""The loop around the engine: deadlines, refusals, failures, control calls, closing. Time is scripted."""

from __future__ import annotations

import math

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer
from inline_compiler import InlineCompiler

from tureen.contract.params import SamplingParams
from tureen.contract.runner import Capacity
from tureen.contract.types import (
    Abort,
    CallResult,
    Close,
    ControlCall,
    EngineFailed,
    GenerateRequest,
    StepReport,
    Submit,
)
from tureen.engine.control import RELEASED_RETRY_S
from tureen.engine.engine import Engine
from tureen.engine.loop import HELPERS_S, Loop, Pace
from tureen.errors import RequestFailed
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner

CAPACITY = Capacity(num_pages=64, page_size=16, max_rows=8, vocab_size=VOCAB_SIZE, context_len=512)


class World:
    """A loop over a real engine with a fake runner. `script[turn]` are the messages that come in before that turn."""

    def __init__(self, script, *, step_s=0.0, runner=None, engine=None, token_budget=512):
        self.now = 100.0
        self.step_s = step_s
        self.script = script
        self.published = []
        self.waits = []
        self.num_turns = 0
        runner = runner or FakeRunner(CAPACITY, choose=lambda token, state, outputs: 65)
        tokenizer = make_byte_tokenizer()
        self.engine = engine or Engine(runner, tokenizer, eos_token_ids=(EOS,), token_budget=token_budget)
        step = self.engine.step

        def timed_step():
            self.now += self.step_s
            return step()

        self.engine.step = timed_step
        self.loop = Loop(self.engine, self.take, self.published.append, clock=lambda: self.now)

    def take(self, wait):
        self.waits.append(wait)
        messages = self.script.get(self.num_turns, [])
        self.num_turns += 1
        if wait is None and not messages:
            return [Close()]  # nothing will ever come: the script has ended
        return messages

    def run(self):
        self.loop.run()
        return self

    def deltas(self, request_id):
        reports = [message for message in self.published if isinstance(message, StepReport)]
        return [delta for report in reports for delta in report.deltas if delta.id == request_id]

    def finish(self, request_id):
        ends = [delta.finish for delta in self.deltas(request_id) if delta.finish]
        assert len(ends) == 1
        return ends[0]

    def text(self, request_id):
        return "".join(delta.text for delta in self.deltas(request_id))


def request(request_id="a", *, num_prompt=4, max_new_tokens=4, **fields):
    return GenerateRequest(
        id=request_id,
        token_ids=tuple(i % 200 for i in range(num_prompt)),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        max_new_tokens=max_new_tokens,
        seed=1,
        **fields,
    )


def test_a_request_runs_to_its_end_and_the_idle_loop_waits_instead_of_spinning():
    world = World({0: [Submit(request())]}).run()
    assert world.text("a") == "AAAA"
    assert world.finish("a").type == "length"
    assert world.waits == [0, 0, 0, 0, 0, None]


def test_every_step_is_published_with_the_engines_figures_and_its_duration():
    world = World({0: [Submit(request())]}, step_s=0.25).run()
    reports = [message for message in world.published if isinstance(message, StepReport)]
    assert [report.stats.total_steps for report in reports] == [1, 2, 3, 4]
    assert all(report.stats.step_ms == pytest.approx(250) for report in reports)


def test_a_chunk_that_sends_nothing_is_still_reported_so_that_a_watchdog_sees_progress():
    world = World({0: [Submit(request(num_prompt=64, max_new_tokens=1))]}, token_budget=16).run()
    reports = [message for message in world.published if isinstance(message, StepReport)]
    assert [len(report.deltas) for report in reports] == [0, 0, 0, 1]


def test_a_deadline_ends_a_request_with_its_partial_text():
    world = World({0: [Submit(request(max_new_tokens=100, deadline_ms=3500))]}, step_s=1.0).run()
    assert world.finish("a").type == "abort"
    assert world.finish("a").reason == "deadline"
    assert world.text("a") == "AAAA"
    assert not world.engine.has_work


def test_a_deadline_counts_from_the_clients_arrival_not_from_when_the_loop_took_it():
    late = Submit(request(max_new_tokens=100, deadline_ms=3500), arrived_s=98.0)
    assert World({0: [late]}, step_s=1.0).run().text("a") == "AA"


def test_a_request_whose_deadline_passed_before_it_was_taken_is_refused():
    world = World({0: [Submit(request(deadline_ms=1000), arrived_s=98.0)]}).run()
    assert (world.finish("a").status, world.finish("a").code) == (503, "deadline_unreachable")
    assert world.finish("a").field == "deadline_ms"
    assert world.engine.stats().total_steps == 0


@pytest.mark.parametrize("order", [(3500, 6500, None), (None, 6500, 3500), (6500, 3500, None)])
def test_every_deadline_is_kept_whatever_ends_before_it(order):
    requests = [Submit(request(f"{ms}", max_new_tokens=10, deadline_ms=ms)) for ms in order]
    world = World({0: requests, 1: [Submit(request("short", max_new_tokens=2, deadline_ms=4500))]}, step_s=1.0).run()
    assert [len(world.text(f"{ms}")) for ms in (3500, 6500, None)] == [4, 7, 10]
    assert (world.finish("3500").reason, world.finish("6500").reason) == ("deadline", "deadline")
    assert (world.finish("None").type, world.finish("short").type) == ("length", "length")


def test_the_first_token_meets_a_first_token_deadline_for_good():
    world = World({0: [Submit(request(max_new_tokens=8, ttft_deadline_ms=1500))]}, step_s=1.0).run()
    assert world.finish("a").type == "length"


def test_a_first_token_deadline_ends_a_request_that_still_waits_for_its_first_token():
    slow = request(num_prompt=64, ttft_deadline_ms=1500)
    world = World({0: [Submit(slow)]}, step_s=1.0, token_budget=16).run()
    assert (world.finish("a").reason, world.text("a")) == ("deadline", "")


def test_a_deadline_that_the_waiting_prompts_make_unreachable_is_refused_at_once():
    first = [Submit(request("warm", num_prompt=64, max_new_tokens=1))]
    queued = [Submit(request(f"q{i}", num_prompt=200 + i, max_new_tokens=1)) for i in range(3)]
    hasty = Submit(request("hasty", ttft_deadline_ms=2000))
    patient = Submit(request("patient", ttft_deadline_ms=600_000))
    world = World({0: first, 4: [*queued, hasty, patient]}, step_s=1.0, token_budget=16).run()
    refusal = world.finish("hasty")
    assert (refusal.status, refusal.code, refusal.field) == (503, "deadline_unreachable", "ttft_deadline_ms")
    assert refusal.retry_after_s >= 2
    assert world.finish("patient").type == "length"


def test_what_is_certain_without_computing_says_nothing_about_the_pace():
    engine = Engine(
        FakeRunner(CAPACITY, choose=lambda token, state, outputs: 65),
        make_byte_tokenizer(),
        eos_token_ids=(EOS,),
        token_budget=16,
        compiler=InlineCompiler(),
    )
    first = [Submit(request("warm", num_prompt=64, max_new_tokens=1))]
    certain = request("certain", num_prompt=400, grammar=GrammarSpec("choice", '["x"]'))
    queued = [Submit(request(f"q{i}", num_prompt=200 + i, max_new_tokens=1)) for i in range(3)]
    hasty = Submit(request("hasty", ttft_deadline_ms=2000))
    world = World({0: first, 4: [Submit(certain)], 5: [*queued, hasty]}, step_s=1.0, engine=engine).run()
    assert (world.text("certain"), world.finish("hasty").code) == ("x", "deadline_unreachable")


def test_nothing_is_refused_for_its_deadline_before_anything_was_measured():
    queued = [Submit(request(f"q{i}", num_prompt=200)) for i in range(3)]
    world = World({0: [*queued, Submit(request("hasty", ttft_deadline_ms=2000))]}).run()
    assert world.finish("hasty").type == "length"


def test_an_aborted_request_ends_with_what_it_has_and_its_pages_are_free():
    world = World({0: [Submit(request(max_new_tokens=100))], 2: [Abort("a")]}).run()
    assert (world.finish("a").type, world.text("a")) == ("abort", "AA")
    assert world.engine.stats().num_running == 0


def test_an_abort_of_an_unknown_id_changes_nothing():
    world = World({0: [Abort("nobody"), Submit(request())], 1: [Abort("nobody")]}).run()
    assert world.finish("a").type == "length"


def test_what_the_engine_refuses_comes_back_as_that_error_and_the_others_go_on():
    world = World({0: [Submit(request("long", max_new_tokens=10_000)), Submit(request())]}).run()
    assert (world.finish("long").type, world.finish("long").status) == ("error", 400)
    assert world.finish("a").type == "length"


def test_a_fault_while_one_request_is_added_fails_that_request_alone():
    world = World({0: [Submit(request("bad")), Submit(request())]})
    add = world.engine.add

    def faulty(one):
        if one.id == "bad":
            raise KeyError("secret")
        add(one)

    world.engine.add = faulty
    world.run()
    assert (world.finish("bad").type, world.finish("bad").status) == ("error", 500)
    assert "secret" not in world.finish("bad").message
    assert world.finish("a").type == "length"


def test_a_deadline_beyond_all_numbers_fails_that_request_alone():
    world = World({0: [Submit(request("bad", deadline_ms=10**400)), Submit(request())]}).run()
    assert (world.finish("bad").type, world.finish("bad").status) == ("error", 500)
    assert world.finish("a").type == "length"


def test_when_the_engine_fails_every_live_request_gets_an_error_and_the_loop_ends():
    world = World({0: [Submit(request("a")), Submit(request("b"))]})

    def broken():
        raise RequestFailed("secret", code="engine_dead")

    world.engine.step = broken
    world.run()
    for request_id in "ab":
        assert (world.finish(request_id).status, world.finish(request_id).code) == (503, "engine_dead")
        assert "secret" not in world.finish(request_id).message
    assert isinstance(world.published[-2], EngineFailed)
    assert not world.published[-2].startup


def test_a_call_is_answered_by_number_and_an_unknown_one_is_an_error():
    world = World({0: [ControlCall(1, "flush_cache"), ControlCall(2, "launch_missiles")]}).run()
    results = {message.number: message for message in world.published if isinstance(message, CallResult)}
    assert results[1].error is None
    assert (results[2].error.status, results[2].error.code) == (404, "not_found")


def test_a_call_that_breaks_is_answered_with_an_error_and_the_engine_lives():
    world = World({0: [ControlCall(1, "flush_cache", {"no_such_argument": 1}), Submit(request())]}).run()
    (result,) = (message for message in world.published if isinstance(message, CallResult))
    assert result.error.status == 500
    assert world.finish("a").type == "length"


def test_closing_ends_what_runs_with_an_abort_and_takes_nothing_more():
    running = Submit(request(max_new_tokens=100))
    world = World({0: [running], 2: [Close(), Submit(request("late"))]}).run()
    assert (world.finish("a").type, world.finish("a").reason) == ("abort", "shutdown")
    assert world.deltas("late") == []
    assert not world.engine.has_work


def test_the_pace_is_the_best_recent_one_less_the_work_that_does_not_show_yet():
    pace = Pace()
    assert pace.seconds_for([1000]) == 0
    pace.add(1.0, 100)
    pace.add(1.0, 10)
    assert pace.seconds_for([1000]) == pytest.approx(10)
    pace.add(4.0, 0)
    assert pace.seconds_for([1000]) == pytest.approx(6)
    assert pace.seconds_for([]) == 0
    assert math.isfinite(pace.seconds_for([10**9]))


def test_figures_are_those_after_an_operation_when_its_answer_comes():
    published = []
    engine = Engine(FakeRunner(CAPACITY), make_byte_tokenizer(), eos_token_ids=(EOS,), token_budget=64)
    inbox = [[Submit(request("a", num_prompt=64, max_new_tokens=1))], [], [ControlCall(1, "flush_cache")], [Close()]]
    Loop(engine, lambda wait_s: inbox.pop(0) if inbox else [], published.append).run()
    at = next(index for index, one in enumerate(published) if isinstance(one, CallResult))
    figures = [one.stats.num_cached_pages for one in published[:at] if isinstance(one, StepReport)]
    assert max(figures) > 0
    assert figures[-1] == 0


def test_who_meets_a_full_queue_is_told_when_a_place_will_be_free():
    def turns(seconds):
        runner = FakeRunner(Capacity(64, 16, 1, VOCAB_SIZE, 512), choose=lambda token, state, outputs: 65)
        engine = Engine(runner, make_byte_tokenizer(), eos_token_ids=(EOS,), max_queued=1)
        long = [Submit(request(f"{index}", max_new_tokens=10)) for index in range(2)]
        script = {0: long, 10: [Submit(request("2", max_new_tokens=10))]}
        script[25] = [Submit(request("3", max_new_tokens=10)), Submit(request("full", max_new_tokens=10))]
        return World(script, step_s=seconds, engine=engine).run()

    for seconds, least, most in ((0.001, 1, 1), (1.0, 5, 10), (4.0, 20, 40)):
        refusal = turns(seconds).finish("full")
        assert (refusal.status, refusal.code) == (503, "queue_full")
        assert least <= refusal.retry_after_s <= most  # a request takes ten steps


def test_how_full_the_queue_is_says_nothing_about_when_memory_comes_back():
    released = [ControlCall(1, "release_memory", {"tags": ["weights"]}), Submit(request("late"))]
    refusal = World({0: [Submit(request())], 4: released}, step_s=20.0).run().finish("late")
    assert (refusal.code, refusal.retry_after_s) == ("memory_released", RELEASED_RETRY_S)


def test_others_prompts_make_no_deadline_of_a_client_unreachable():
    """They may come later, where clients share the engine fairly."""
    heavy = [Submit(request(f"{index}", num_prompt=200, client="heavy", cache_salt=f"{index}")) for index in range(30)]
    late = {
        name: Submit(request(name, ttft_deadline_ms=4000, num_prompt=16, client=name)) for name in ("heavy", "light")
    }
    world = World({0: heavy, 40: list(late.values())}, step_s=0.5, token_budget=16).run()
    assert world.finish("heavy").code == "deadline_unreachable"
    assert world.finish("light").code is None


def test_a_resumed_request_keeps_its_deadline_and_has_had_its_first_token():
    """A deadline that has passed meanwhile is its end, not a refusal; the one for the first token was met."""
    late = request("late", max_new_tokens=9, deadline_ms=1000, resumed=(65, 65))
    going = request("going", max_new_tokens=9, ttft_deadline_ms=1000, resumed=(65, 65))
    world = World({0: [Submit(late, 90.0), Submit(going, 90.0)]}).run()
    assert (world.finish("late").type, world.finish("late").reason) == ("abort", "deadline")
    assert world.finish("going").type == "length"
    assert world.text("going") == "A" * 7


def test_an_idle_engine_tells_that_a_helper_is_being_replaced_and_when_it_is_back(monkeypatch):
    """It looks now and then where it has helpers, and reports what has changed only."""
    down = [(), (), ("one",), ("one",), (), ()]  # at each turn
    world = World({len(down) - 1: [Close()]})
    monkeypatch.setattr(Engine, "helpers_down", property(lambda _: down[world.num_turns]))
    world.run()
    assert world.waits == [0] + [HELPERS_S] * (len(down) - 1)
    assert len(world.published) == 2  # at each change


def test_an_idle_engine_without_helpers_waits_until_it_is_told_something():
    world = World({}).run()
    assert (world.waits, world.published) == ([0, None], [])


@pytest.mark.parametrize("when_idle", [False, True])
def test_what_runs_when_idle_makes_no_deadline_unreachable_but_those_of_its_like(when_idle):
    many = [Submit(request(f"{index}", num_prompt=200, cache_salt=f"{index}", when_idle=True)) for index in range(30)]
    late = Submit(request("late", ttft_deadline_ms=4000, num_prompt=16, when_idle=when_idle))
    world = World({0: many, 40: [late]}, step_s=0.5, token_budget=16).run()
    assert world.finish("late").code == ("deadline_unreachable" if when_idle else None)
