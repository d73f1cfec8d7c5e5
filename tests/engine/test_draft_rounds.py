"""A draft model that fails, is slow or is always wrong costs little, and a long prompt delays no other request."""

from __future__ import annotations

import random
from itertools import chain, count, repeat
from types import SimpleNamespace

import msgspec
import pytest
from byte_tokenizer import EOS
from draft_engines import OTHER, SAME, Given, make_engine, requests_of, run
from samples import some
from world import make_request

from tureen.contract.runner import NAN_LOGITS, FinishedStep, RowOutput, StepOutput
from tureen.engine.draft_model import DraftModel
from tureen.engine.guessing import _within
from tureen.engine.scheduler import Drafters
from tureen.grammar.base import GrammarSpec

ROUND_S = 0.1  # a tenth of a step


def drafting_engine(folders, drafting=SAME, **settings):
    """An engine that guesses from repeated text too, and its draft model, whose rounds take ROUND_S."""
    engine = make_engine(folders, drafting, **settings)
    guesser = engine.rows.guesser
    engine.scheduler.drafters = Drafters(guesser.guess, guesser.draft)
    guesser.draft_model._clock = (tick * ROUND_S for tick in count()).__next__
    return engine, guesser.draft_model


def scripted(model, output):
    """Makes the draft model answer each row that draws with `output`. Returns the number of tokens of each round."""
    rounds = []

    def submit(batch, masks=None):
        rounds.append(sum(len(row.token_ids) for row in batch.rows))
        return FinishedStep(StepOutput(tuple(output if row.sample else RowOutput() for row in batch.rows)))

    model._runner.submit = submit
    return rounds


def failing(*args, **named):
    raise MemoryError


def once(max_new_tokens=40, text=b"Once there was a king", **more):
    return make_request("r", tuple(text), max_new_tokens=max_new_tokens, ignore_eos=True, **more)


def test_an_engine_whose_draft_model_fails_continues_without_it(folders, caplog):
    engine, model = drafting_engine(folders)
    submit, rounds, closed = model._runner.submit, count(), []

    def failing_later(batch, masks=None):
        return failing() if next(rounds) > 9 else submit(batch, masks)

    model._runner.submit, model._runner.close = failing_later, lambda: closed.append(True)
    with caplog.at_level("ERROR", logger="tureen"):
        answers = run(engine, [once()])
    assert answers == run(make_engine(folders, None), [once()])
    assert engine.rows.guesser.draft_model is None
    assert closed == [True]
    assert [record.message for record in caplog.records if "draft model" in record.message] == [
        "the draft model failed, so the server continues without it; restart the server to use it again, or leave "
        "--draft-model out"
    ]


def test_a_flush_during_which_the_draft_model_fails_ends_only_the_draft_model(folders):
    engine, model = drafting_engine(folders)
    run(engine, [once()])
    model._runner._parts.renew_cache = failing
    engine.control.flush_cache()
    assert engine.rows.guesser.draft_model is None
    assert run(engine, [once()]) == run(make_engine(folders, None), [once()])


@pytest.mark.parametrize("output", [RowOutput((ord("a"),)), RowOutput(error=NAN_LOGITS), RowOutput((EOS + 100,))])
def test_guesses_that_are_never_offered_are_wrong_guesses(folders, output):
    """A grammar forbids them, the draft model computes no numbers, or the model does not have the token."""
    engine, model = drafting_engine(folders)
    rounds = scripted(model, output)
    request = msgspec.structs.replace(once(100), grammar=GrammarSpec("regex", "[0-9]{100}"), grammar_field="regex")
    run(engine, [request])
    assert 0 < len(rounds) < 20


@pytest.mark.sampled
@pytest.mark.parametrize("drafting", [SAME, OTHER])
@pytest.mark.parametrize("seed", some(range(40, 80), 4))
def test_two_sources_of_guesses_change_no_token(folders, drafting, seed):
    engine, _ = drafting_engine(folders, drafting, max_total_tokens=160)
    requests = requests_of(random.Random(seed))
    for _ in range(2):
        assert run(engine, requests) == run(make_engine(folders, None), requests)
    assert engine.stats().total_guessed_tokens > 0


def test_a_draft_model_that_does_not_pay_leaves_guesses_from_repeated_text(folders):
    engine, model = drafting_engine(folders)
    model.round_s = dict.fromkeys(range(1, 9), 100.0)
    run(engine, [once(14, text=b"ab", logit_bias={97: 100.0})])
    assert engine.stats().total_right_guesses > 0


def test_pages_are_taken_only_for_guesses_that_pay(folders):
    engine, model = drafting_engine(folders)
    model.round_s = dict.fromkeys(range(1, 9), 100.0)
    grow, wanted = engine.cache.grow, []

    def recording(table, num_tokens):
        wanted.append(num_tokens)
        return grow(table, num_tokens)

    engine.cache.grow = recording
    run(engine, [once(20, text=b"abcdefghij")])
    assert all(num_tokens % 4 == 1 for num_tokens in wanted)  # the first token of a page


def test_one_slow_round_does_not_end_the_guesses(folders):
    for position in (1, 8):
        engine, model = drafting_engine(folders)
        times = chain((position * [0.0, ROUND_S])[: 2 * position - 1], [1000.0], repeat(0.0))
        model._clock = times.__next__
        run(engine, [once(60)])
        assert engine.stats().total_right_guesses > 30


def test_the_time_of_more_rows_is_first_that_of_fewer(folders):
    model = make_engine(folders, SAME).rows.guesser.draft_model
    texts = [Given(b"Some"), Given(b"One")]
    texts[1].slot = 1
    texts[1].table.pages = tuple(range(20, 40))
    model.round_s = {1: 2.0}
    model._clock = map(float, count()).__next__
    model.draft(texts, [1, 1])
    assert 1.5 < model.round_s[2] < 2.0


def test_a_long_prompt_is_caught_up_on_in_small_pieces(folders):
    engine, model = drafting_engine(folders)
    large = DraftModel(model._runner, EOS + 1, 512, clock=model._clock)
    engine.rows.guesser.draft_model = large
    rounds = scripted(large, RowOutput((97,)))
    run(engine, [once(60, text=b"Once there was a king." * 12)])
    assert max(rounds) <= 64
    assert sum(rounds) > 260


def test_a_request_that_catches_up_takes_no_guesses_from_others(folders):
    model = make_engine(folders, SAME).rows.guesser.draft_model
    texts = [Given(b"Once there was a king who had"), Given(b"abc")]
    texts[1].slot = 1
    texts[1].table.pages = tuple(range(20, 40))
    guesses = model.draft(texts, [2, 2])
    assert [len(guessed) for guessed in guesses] == [0, 2]


def test_a_prompt_is_not_caught_up_on_for_a_short_answer(folders):
    engine, model = drafting_engine(folders)
    rounds = scripted(model, RowOutput((97,)))
    run(engine, [once(4, text=b"Once there was a king." * 12)])
    assert rounds == []


def test_known_pages_are_not_compared_again(folders):
    model = make_engine(folders, SAME).rows.guesser.draft_model
    given = Given(b"Once there was a king who had")
    while not model.draft([given], [1])[0]:
        pass

    class Counting(dict):
        num_reads = 0

        def get(self, *args):
            self.num_reads += 1
            return super().get(*args)

    model._written = Counting(model._written)
    assert model.num_missing(given) == 1
    model._written.num_reads = 0
    assert model.num_missing(given) == 1
    assert model._written.num_reads <= 1


def test_pages_that_came_back_after_another_request_are_compared_again(folders):
    model = make_engine(folders, SAME).rows.guesser.draft_model
    given, other = Given(b"Once there was"), Given(b"Another text of")
    other.slot = 1
    model.draft([given], [1])
    assert model.num_missing(given) == 1
    model.draft([other], [1])
    given.table = SimpleNamespace(pages=given.table.pages)  # as after a preemption
    assert model.num_missing(given) == given.num_tokens


@pytest.mark.parametrize(
    ("budget", "counts", "shares"),
    [(9, [0, 4, 4], [0, 4, 4]), (5, [8, 0, 1, 8], [2, 0, 1, 2]), (2, [8, 8, 8], [1, 1, 0])],
)
def test_guesses_share_what_the_budget_of_a_step_leaves(budget, counts, shares):
    assert _within(budget, counts) == shares
