import math

import numpy as np
import pytest
import torch
from arithmetics import arithmetic, make_array, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import either
from sampling_reference import kept_probabilities, log_softmax, make_logits, make_state, processed_logits
from transformers import NoBadWordsLogitsProcessor, TypicalLogitsWarper

from tureen.sampling import processors
from tureen.sampling.processors import CUTS, LOGIT_STAGES, num_kept, run_logit_stages, stages_of, typical_p
from tureen.sampling.slots import start_slot

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 40
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
penalties = st.floats(-2, 2)
a_few = settings(max_examples=either(100, 25))


def _run(logits, *states):
    """Logits [rows, vocab] after the stages, row i belonging to states[i]."""
    slots = [start_slot(state, stages_of(state.params)) for state in states]
    result = make_rows(logits)
    run_logit_stages(arithmetic(), result, slots, [len(state.output_ids) for state in states])
    return make_array(result)


def test_the_stages_run_in_the_documented_order():
    logit_stages = [stage.run.__name__ for stage in LOGIT_STAGES]
    assert logit_stages == [
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
    ]
    assert [stage.num_kept.__name__ for stage in CUTS] == ["top_k", "top_p", "min_p"]
    documented = processors.__doc__.split("order applied.")[1]
    words = ["frequency", "presence", "repetition", *logit_stages[3:], "temperature", "top_k", "top_p", "min_p"]
    words += ["typical_p", "draw"]
    assert sorted(words, key=documented.index) == words


def test_a_row_with_default_parameters_uses_no_stage():
    assert stages_of(make_state().params) == ()
    assert not processors.uses_cut(make_state().params)
    assert not run_logit_stages(arithmetic(), make_rows(np.zeros((1, 4))), [start_slot(make_state(), ())], [0])


@pytest.mark.sampled
@a_few
@given(seed=st.integers(0, 10**6), output=tokens, penalty=penalties)
def test_frequency_penalty_subtracts_per_occurrence_in_the_output(seed, output, penalty):
    logits = make_logits(seed, VOCAB)
    expected = logits.astype(np.float64) - penalty * np.bincount(output, minlength=VOCAB)
    result = _run([logits], make_state(output=output, frequency_penalty=penalty))
    np.testing.assert_allclose(result[0], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.sampled
@a_few
@given(seed=st.integers(0, 10**6), output=tokens, penalty=penalties)
def test_presence_penalty_subtracts_once_whatever_the_count(seed, output, penalty):
    logits = make_logits(seed, VOCAB)
    expected = logits.astype(np.float64) - penalty * (np.bincount(output, minlength=VOCAB) > 0)
    result = _run([logits], make_state(output=output, presence_penalty=penalty))
    np.testing.assert_allclose(result[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled
@a_few
@given(seed=st.integers(0, 10**6), prompt=tokens, output=tokens, penalty=st.floats(0.01, 2))
def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output(
    seed, prompt, output, penalty
):
    logits = make_logits(seed, VOCAB)
    wide = logits.astype(np.float64)
    seen = np.isin(np.arange(VOCAB), prompt + output)
    expected = np.where(seen, np.where(wide > 0, wide / penalty, wide * penalty), wide)
    result = _run([logits], make_state(prompt=prompt, output=output, repetition_penalty=penalty))
    np.testing.assert_allclose(result[0], expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_repetition_penalty_zero_and_one_are_off(penalty):
    assert stages_of(make_state(repetition_penalty=penalty).params) == ()


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40])
def test_a_tiny_repetition_penalty_gives_finite_logits_and_frees_no_forbidden_token(penalty):
    result = _run([[5.0, -3.0, -math.inf, 0.0]], make_state(prompt=(0, 1, 2, 3), repetition_penalty=penalty))
    assert np.isfinite(result[0, [0, 1, 3]]).all()
    assert result[0, 2] == -math.inf


@pytest.mark.sampled
@a_few
@given(
    prompt=st.lists(st.integers(-1, 5), max_size=20), output=st.lists(st.integers(0, 5), max_size=40), data=st.data()
)
def test_penalties_look_at_the_last_tokens_whether_drawn_here_or_before(prompt, output, data):
    """A token of the prompt that has no id, such as a picture's, has a place in the window."""
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    params["repeat_last_n"] = data.draw(st.integers(-1, 70))
    whole = make_state(prompt=prompt, output=output, **params)
    logits = make_logits(0, VOCAB)
    split = data.draw(st.integers(0, len(output)))
    slot = start_slot(make_state(prompt=prompt, output=output[:split], **params), stages_of(whole.params))
    for token in output[split:]:
        slot.record(token)
    result = make_rows([logits])
    run_logit_stages(arithmetic(), result, [slot], [len(output)])
    assert np.array_equal(make_array(result)[0], processed_logits(logits, whole))


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_window_of_no_tokens_switches_penalties_off(name):
    assert stages_of(make_state(**{name: 1.5, "repeat_last_n": 0}).params) == ()


def test_penalties_do_not_count_the_prompt_except_repetition():
    logits = make_logits(0, VOCAB)
    state = make_state(prompt=(4, 5), frequency_penalty=1.0, presence_penalty=1.0)
    assert np.array_equal(_run([logits], state)[0], logits)


def test_min_new_tokens_forbids_the_ends_until_it_is_reached():
    logits = make_logits(0, VOCAB)
    for num_outputs, is_forbidden in ((0, True), (2, True), (3, False), (4, False)):
        state = make_state(output=[9] * num_outputs, ends=(3, 7, 7), min_new_tokens=3)
        result = _run([logits], state)[0]
        expected = logits.copy()
        expected[[3, 7]] = -np.inf if is_forbidden else expected[[3, 7]]
        assert np.array_equal(result, expected)


@pytest.mark.sampled
@a_few
@given(bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1, max_size=20))
def test_logit_bias_is_added(bias):
    logits = make_logits(1, VOCAB)
    expected = logits.astype(np.float64)
    for token, value in bias.items():
        expected[token] += value
    np.testing.assert_allclose(_run([logits], make_state(logit_bias=bias))[0], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.sampled
@a_few
@given(allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
def test_tokens_that_are_not_allowed_are_forbidden_and_the_others_stay_as_they_are(allowed):
    logits = make_logits(1, VOCAB)
    result = _run([logits], make_state(allowed_token_ids=tuple(sorted(allowed))))[0]
    assert set(np.flatnonzero(result > -np.inf).tolist()) == allowed
    assert all(result[token] == logits[token] for token in allowed)


few = st.integers(0, 4)


@pytest.mark.sampled
@a_few
@given(
    banned=st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    output=st.lists(few, max_size=12),
    split=st.integers(0, 12),
)
def test_what_would_complete_a_bad_word_is_forbidden_as_transformers_forbids_it(banned, output, split):
    logits = make_logits(1, VOCAB)
    oracle = NoBadWordsLogitsProcessor([list(sequence) for sequence in banned])
    expected = oracle(torch.tensor([output], dtype=torch.int64), torch.tensor(logits[None]))[0].numpy()
    slot = start_slot(make_state(output=output[:split], banned=banned, bad_words=("x",)), (6,))
    for token in output[split:]:
        slot.record(token)
    result = make_rows([logits])
    run_logit_stages(arithmetic(), result, [slot], [len(output)])
    np.testing.assert_array_equal(make_array(result)[0], expected)


def test_a_bias_does_not_free_a_token_that_min_new_tokens_forbids():
    state = make_state(ends=(2,), min_new_tokens=1, logit_bias={2: 100.0})
    assert _run([make_logits(0, VOCAB)], state)[0, 2] == -np.inf


@pytest.mark.sampled
@a_few
@given(seed=st.integers(0, 10**6), prompt=tokens, outputs=st.lists(tokens, min_size=3, max_size=3), data=st.data())
def test_rows_of_a_batch_with_different_stages_equal_the_plain_pipeline(seed, prompt, outputs, data):
    params = st.fixed_dictionaries(
        {},
        optional={
            "frequency_penalty": penalties,
            "presence_penalty": penalties,
            "repetition_penalty": st.floats(0, 2),
            "repeat_last_n": st.integers(-1, 60),
            "min_new_tokens": st.integers(0, 20),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
        },
    )
    states = [
        make_state(slot, prompt=prompt, output=output, ends=(0, 5), **data.draw(params))
        for slot, output in enumerate(outputs)
    ]
    logits = make_logits(seed, VOCAB, rows=3)
    result = _run(logits, *states)
    expected = np.stack([processed_logits(row, state) for row, state in zip(logits, states, strict=True)])
    assert np.array_equal(result, expected)


def _num_kept(logits, **params):
    """What the cuts keep of the whole ranking, one row."""
    p = make_state(**params).params
    weights = np.exp((np.sort(logits.astype(np.float64))[::-1] - logits.max()) / p.temperature)
    ranked = weights[None]
    return int(num_kept(ranked, ranked.sum(axis=1), [p])[0])


@pytest.mark.sampled
@a_few
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.just(-1), st.integers(1, 60)),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_the_cuts_are_joint_on_one_full_softmax(seed, temperature, top_k, top_p, min_p):
    logits = make_logits(seed, VOCAB)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    probabilities, margin = kept_probabilities(logits, make_state(**params).params)
    if margin > 1e-12:
        assert _num_kept(logits, **params) == np.count_nonzero(probabilities)


def test_top_p_is_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    assert [_num_kept(logits, top_p=p) for p in (0.1, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876)] == [
        1, 1, 2, 2, 3, 3, 4,
    ]  # fmt: skip


def test_top_p_is_measured_on_the_full_softmax_not_on_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # Renormalised after top_k = 2 the first token would have 0.571 and reach 0.5 alone.
    assert _num_kept(logits, top_k=2, top_p=0.5) == 2


def test_min_p_keeps_tokens_relative_to_the_best():
    logits = np.log(np.array([0.5, 0.26, 0.24], dtype=np.float32))
    assert [_num_kept(logits, min_p=p) for p in (0.47, 0.5, 0.53, 1.0)] == [3, 2, 1, 1]
    assert _num_kept(np.zeros(5, dtype=np.float32), min_p=1.0) == 5


@pytest.mark.sampled
@a_few
@given(
    seed=st.integers(0, 10**6),
    mass=st.floats(0.01, 0.999),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    top_k=st.sampled_from([None, 1, 2, 40]),
)
def test_typical_p_keeps_what_transformers_keeps(seed, mass, scale, top_k):
    row = np.sort(make_logits(seed, VOCAB, scale=scale).astype(np.float64))[::-1]
    scores = torch.tensor(row.copy())[None]
    if top_k is not None:
        scores[:, top_k:] = -math.inf
    expected = TypicalLogitsWarper(mass=mass)(None, scores).isfinite()[0].tolist()
    weights = np.exp(row - row[0]) if top_k is None else np.where(np.arange(VOCAB) < top_k, np.exp(row - row[0]), 0.0)
    assert typical_p(weights[None], [mass])[0].tolist() == expected


def test_typical_p_may_drop_the_best_token_and_keeps_equal_ones_together():
    weights = np.array([[0.6, 0.1, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25, 0.0]])
    assert typical_p(weights, [0.05, 0.3]).tolist() == [[True, False, False, False, False], [True] * 4 + [False]]
    peaked = np.array([[0.4, 0.3, 0.15, 0.15]])  # entropy 1.29 nats: -log 0.3 = 1.20 is nearest, -log 0.4 = 0.92
    assert typical_p(peaked, [0.2]).tolist() == [[False, True, False, False]]


def test_the_best_token_always_stays():
    assert _num_kept(make_logits(3, VOCAB), top_k=1, top_p=1e-300, min_p=1.0) == 1


def test_top_k_larger_than_the_vocabulary_keeps_all():
    assert _num_kept(make_logits(3, VOCAB), top_k=2**63 - 1) == VOCAB


@pytest.mark.sampled
@a_few
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.05, 50))
def test_temperature_divides_the_differences_between_logits(seed, temperature):
    logits = make_logits(seed, VOCAB)
    [divisor] = processors.temperature([make_state(temperature=temperature).params])
    np.testing.assert_allclose(log_softmax(logits, divisor), log_softmax(logits.astype(np.float64) / temperature))


def test_greedy_rows_report_log_probabilities_at_temperature_one():
    params = [make_state(temperature=0.0).params, make_state(temperature=0.5).params]
    assert processors.temperature(params).tolist() == [1.0, 0.5]
