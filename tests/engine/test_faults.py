"""A runner that raises or computes NaN, and aborts at every step: only those at fault end, nothing is left behind."""

import msgspec
import pytest
from samples import some
from toy_grammar import ToyGrammar
from world import World, make_request

from tureen.contract.types import LogprobSpec
from tureen.engine.rows import MAX_FAILED_STEPS
from tureen.errors import RequestFailed
from tureen.grammar.base import GrammarSpec
from tureen.grammar.expression import GrammarError

STEM = list(range(20, 42))


def _workload(fault=None):
    """Ten requests with common prefixes in a pool that makes preemption happen."""
    world = World(num_pages=24, page_size=4, max_rows=6, token_budget=12, fault=fault)
    for index in range(10):
        prompt = [*STEM[: 8 + index % 3 * 7], index] if index % 4 else [index, 1, 2]
        spec = LogprobSpec(prompt_start=index) if index % 5 == 1 else None
        world.add(
            make_request(
                f"r{index}", prompt, seed=index, temperature=1.0, max_new_tokens=24, ignore_eos=True, logprobs=spec
            )
        )
    return world


def _num_calls():
    world = _workload()
    world.drain()
    assert world.engine.stats().total_preemptions > 0
    world.check_answers()
    return world.num_steps


NUM_STEPS = _num_calls()


@pytest.mark.sampled
def test_an_abort_at_every_step_of_every_request_ends_it_cleanly():
    for step in some(range(NUM_STEPS), 20):
        for victim in ("r0", "r9"):
            world = _workload()
            for _ in range(step):
                world.step()
            was_open = world.answers[victim].finish is None
            tokens = len(world.answers[victim].token_ids)
            world.engine.abort(victim)
            world.engine.abort(victim)
            world.drain()
            world.check_answers()
            assert (world.answers[victim].finish.type == "abort") == was_open
            assert len(world.answers[victim].token_ids) == tokens or not was_open


@pytest.mark.sampled
def test_aborting_all_at_every_step_leaves_nothing_behind():
    for step in some(range(NUM_STEPS), 20):
        world = _workload()
        for _ in range(step):
            world.step()
        for request_id in world.answers:
            world.engine.abort(request_id)
        world.drain()
        world.check_answers()


@pytest.mark.sampled
@pytest.mark.parametrize("call", some(range(NUM_STEPS), 20))
def test_a_step_that_raises_once_changes_no_answer(call):
    world = _workload(lambda number, row: "raise" if number == call else None)
    world.drain()
    world.check_answers()
    assert all(answer.finish.type != "error" for answer in world.answers.values())


def _fault_of(victim, kind, from_call=0):
    """A fault of whatever rows belong to one request."""

    def fault(call, row):
        sequence = world.engine._sequences.get(victim)
        at_fault = sequence is not None and sequence.slot == row.slot and call >= from_call
        return kind if at_fault else None

    world = _workload(fault)
    return world


@pytest.mark.sampled
@pytest.mark.parametrize("call", some(range(0, NUM_STEPS, 4), 7))
@pytest.mark.parametrize("victim", ["r0", "r1", "r5"])
def test_a_row_that_keeps_raising_fails_alone(call, victim):
    world = _fault_of(victim, "raise", call)
    world.drain()
    world.check_answers(may_fail=True)
    failed = [request_id for request_id, answer in world.answers.items() if answer.finish.type == "error"]
    assert failed in ([victim], [])
    if failed:
        finish = world.answers[victim].finish
        assert (finish.status, finish.code) == (500, "request_failed")


@pytest.mark.sampled
@pytest.mark.parametrize("call", some(range(0, NUM_STEPS, 4), 7))
@pytest.mark.parametrize("victim", ["r0", "r1", "r5"])
def test_nan_ends_its_request_and_is_never_found_in_the_cache_again(call, victim):
    """NaN shows only where logits are asked for, so pages with NaN may have been published before."""
    world = _fault_of(victim, "poison", call)
    world.drain()
    world.check_answers(may_fail=True)
    for request_id, answer in tuple(world.answers.items()):
        if answer.finish.type == "error":
            assert (answer.finish.status, answer.finish.code) == (500, "nan_logits")
            again = world.requests[request_id]
            world.add(make_request(f"{request_id} again", again.token_ids, max_new_tokens=3))
            world.drain()
            world.check_answer(f"{request_id} again")


def test_nan_in_the_middle_of_a_prompt_is_forgotten_with_all_that_was_computed_from_it():
    world = World(page_size=4, token_budget=8, fault=lambda call, row: "poison" if call == 0 else None)
    world.add(make_request("bad", STEM))
    world.step()
    assert len(world.engine.cache.match(("", ""), STEM, 99)) == 2
    world.drain()
    assert world.answers["bad"].finish.code == "nan_logits"
    assert world.engine.cache.match(("", ""), STEM, 99) == []
    world.add(make_request("good", STEM))
    world.drain()
    world.check_answer("good")


def test_a_reused_prefix_that_turns_out_to_be_nan_is_forgotten_too():
    world = World(page_size=4, token_budget=8, fault=lambda call, row: "poison" if call == 0 else None)
    world.add(make_request("maker", STEM))
    world.step()
    world.engine.abort("maker")  # before anybody saw the NaN
    world.drain()
    world.add(make_request("user", STEM))
    world.drain()
    assert world.answers["user"].finish.code == "nan_logits"
    world.add(make_request("next", STEM))
    world.drain()
    world.check_answer("next")


def test_three_steps_in_which_nothing_runs_end_the_engine():
    world = World(fault=lambda call, row: "raise")
    for index in range(3):
        world.add(make_request(f"r{index}"))
        if index < 2:
            world.step()
            assert world.answers[f"r{index}"].finish.code == "request_failed"
        else:
            with pytest.raises(RequestFailed) as error:
                world.engine.step()
            assert error.value.code == "engine_dead"


def test_an_input_that_makes_every_step_fail_does_not_end_the_engine():
    world = World(fault=lambda call, row: "raise" if 13 in row.token_ids else None)
    for index in range(3 * MAX_FAILED_STEPS):
        world.add(make_request(f"bad{index}", [13, index]))
        world.step()
        assert world.answers[f"bad{index}"].finish.code == "request_failed"
    world.add(make_request("good", [1, 2, 3]))
    world.drain()
    world.check_answer("good")


def test_a_good_step_between_failures_keeps_the_engine_alive():
    world = World(fault=lambda call, row: "raise" if len(row.token_ids) == 5 else None)
    for index in range(3 * MAX_FAILED_STEPS):
        world.add(make_request(f"bad{index}", [20 + index] * 5))
        world.step()
        world.add(make_request(f"good{index}", [1] * 4, max_new_tokens=1))
        world.step()
    world.drain()
    assert [answer.finish.type for answer in world.answers.values()] == ["error", "length"] * 9


@pytest.mark.parametrize("where", ["fill_mask", "accept", "forced", "is_done"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(GrammarError("too many items"), 400, "grammar_too_complex"), (RuntimeError("a library's own"), 500, None)],
)
def test_a_grammar_that_cannot_be_followed_any_more_ends_its_own_request(monkeypatch, where, error, status, code):
    right = getattr(ToyGrammar, where)

    def refuse(grammar, *given):
        if grammar.text.startswith("hard") and len(grammar.output) >= 3:
            raise error
        return right.fget(grammar) if isinstance(right, property) else right(grammar, *given)

    monkeypatch.setattr(ToyGrammar, where, property(refuse) if isinstance(right, property) else refuse)
    world = World()
    for name in ("hard", "easy"):
        request = make_request(name, max_new_tokens=20, seed=3)
        grammar = GrammarSpec("regex", f"{name} 12")
        world.add(msgspec.structs.replace(request, grammar=grammar, grammar_field="sampling_params.regex"))
    world.add(make_request("free", max_new_tokens=20))
    world.engine.prepare()
    world.drain()
    finish = world.answers["hard"].finish
    assert (finish.type, finish.status) == ("error", status)
    if code is not None:
        assert (finish.code, finish.field) == (code, "sampling_params.regex")
        assert "too many items" in finish.message
    for name in ("easy", "free"):
        world.check_answer(name)


def test_a_compiled_grammar_that_cannot_be_started_ends_its_own_request():
    world = World()

    def refuse(text):
        raise RuntimeError("a library's own")

    world.compiler.make = refuse
    request = msgspec.structs.replace(make_request("hard"), grammar=GrammarSpec("regex", "hard 12"))
    world.add(request)
    world.add(make_request("free"))
    world.drain()
    assert (world.answers["hard"].finish.status, world.answers["hard"].finish.code) == (500, "grammar_failed")
    world.check_answer("free")
