"""A draft model changes no token, whatever it guesses, and saves steps if its guesses are right."""

from __future__ import annotations

import random
from itertools import count

import pytest
from byte_tokenizer import EOS
from draft_engines import OTHER, SAME, Given, make_engine, requests_of, run
from runner_driver import folder_source
from samples import some
from world import make_request

from tureen import build
from tureen.config import Config
from tureen.errors import StartupError
from tureen.runner import draft


@pytest.mark.sampled
@pytest.mark.parametrize("drafting", [SAME, OTHER])
@pytest.mark.parametrize("seed", some(range(40), 6))
def test_tokens_and_log_probabilities_are_those_without_a_draft_model(folders, drafting, seed):
    """In batches, with shared prefixes, a small cache, preemption, and cached prompts at the second time."""
    plain, guessing = make_engine(folders, None), make_engine(folders, drafting, max_total_tokens=160)
    requests = requests_of(random.Random(seed))

    def preempt(step):
        if step % 11 == 10:
            guessing.scheduler.preempt_all()

    for _ in range(2):
        assert run(guessing, requests, between=preempt) == run(plain, requests)
    assert guessing.stats().total_guessed_tokens > 0
    assert guessing.stats().total_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_equal_draft_model_is_always_right(folders, temperature):
    """Also after a preemption, and for a prompt in the prefix cache."""
    engine = make_engine(folders, SAME)
    requests = [
        make_request(f"r{index}", tuple(b"Once there was a king " * 2), max_new_tokens=60, temperature=temperature,
                     seed=index, ignore_eos=True)
        for index in range(3)
    ]  # fmt: skip

    def preempt(step):
        if step == 9:
            engine.scheduler.preempt_all()

    for _ in range(2):
        run(engine, requests, between=preempt)
    stats = engine.stats()
    assert stats.total_right_guesses > 200
    assert stats.total_right_guesses == stats.total_guessed_tokens


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"Some people had a king.", b"Many people had a king."),  # other tokens before equal pages
        (b"Some people had a king.", b"Some people had a car, and they"),  # another end, and a page more
        (b"Some people had a king. They", b"Some people had"),  # fewer tokens, as after wrong guesses
    ],
)
def test_what_a_page_held_before_changes_no_guess(folders, before, after):
    fresh, used = (make_engine(folders, SAME).rows.guesser.draft_model for _ in range(2))
    for text, most in ((before, 7), (before + b"!?", 2), (after, 7)):
        guesses = used.draft([Given(text)], [most])
        while not guesses[0]:  # a prompt of more tokens than the budget
            guesses = used.draft([Given(text)], [most])
    given = Given(after)
    expected = [()]
    while not expected[0]:
        expected = fresh.draft([given], [7])
    assert guesses == expected
    assert len(guesses[0]) == 7


def test_tokens_that_only_the_model_has_are_not_given_to_the_draft_model(folders):
    model = make_engine(folders, SAME).rows.guesser.draft_model
    given = Given(b"Some")
    given.token_ids[1] = EOS + 100
    assert model.draft([given], [3]) == [()]


def test_the_draft_model_computes_each_known_token_once(folders):
    engine = make_engine(folders, OTHER)
    computed = []
    model = engine.rows.guesser.draft_model
    submit = model._runner.submit

    def counting(batch, masks=None):
        computed.append(sum(len(row.token_ids) for row in batch.rows))
        return submit(batch, masks)

    model._runner.submit = counting
    request = make_request("r", tuple(b"Once there was a king " * 8), max_new_tokens=1 << 6, ignore_eos=True)
    run(engine, [request])
    num_prompt, num_guessed = len(request.token_ids), engine.stats().total_guessed_tokens
    assert num_prompt < sum(computed) <= num_prompt + 2 * 64 + num_guessed
    computed.clear()
    run(engine, [request])
    assert sum(computed) <= 2 * 64 + num_guessed + 16  # the prompt's pages are in the prefix cache


def test_a_draft_model_that_is_always_wrong_is_asked_less_and_less(folders):
    engine = make_engine(folders, OTHER)
    engine.rows.guesser.draft_model._clock = count().__next__
    run(engine, [make_request("r", tuple(b"Once there was"), max_new_tokens=200, temperature=1.0, ignore_eos=True)])
    assert engine.stats().total_guessed_tokens < 60


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"speculative": False}, "--no-speculative"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"kernels": "torch"}, "--kernels torch"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"dtype": "float16"}, "need the native kernels"),
    ],
)
def test_a_setting_that_does_not_go_with_a_draft_model_is_refused(settings, why):
    with pytest.raises(StartupError, match=why) as failure:
        draft.check_settings(Config(draft_model="small", **settings))
    assert failure.value.field == "draft_model"
    assert "--draft-model small" in failure.value.message


def test_an_encoder_takes_no_draft_model():
    class Encoder:
        name = "minilm"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "model_config", lambda source: {})
        patch.setattr(build, "is_encoder", lambda hf: True)
        with pytest.raises(StartupError, match="minilm is an encoder"):
            build.make_engine(Config(draft_model="small"), model=build.Model(Encoder(), None))


def test_a_draft_model_with_another_vocabulary_is_refused(folders):
    sources = folder_source(folders / str(SAME)), folder_source(folders / str(OTHER))
    config = Config(draft_model="small")
    draft.check_models(config, sources, ([b"a", b"b"], [b"a", b"b"]))
    with pytest.raises(StartupError, match=r"vocabularies of 3 \(2 tokens\) and 4 \(3 tokens\) differ from token 1 on"):
        draft.check_models(config, sources, ([b"a", b"b"], [b"a", b"c", b"d"]))
