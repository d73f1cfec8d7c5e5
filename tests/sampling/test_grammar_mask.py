"""What a grammar's mask does in the sampler: the last word before temperature, and nothing to other rows."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from arithmetics import arithmetic, make_array, make_rows, make_sampler
from sampling_reference import make_logits, make_state
from scipy.stats import chisquare

from tureen.contract.runner import NAN_LOGITS, NOTHING_TO_DRAW
from tureen.contract.types import LEAST_LOGPROB, LogprobSpec
from tureen.sampling.custom import CustomProcessors, load_registered

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 131  # no multiple of 32


def mask_of(*allowed, vocab_size=VOCAB):
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return np.array(words, dtype=np.uint32)


def sample(states, logits, masks, step=0):
    sampler = make_sampler(len(states), VOCAB)
    for state in states:
        sampler.set_slot(state)
    positions = [len(state.prompt_ids) + len(state.output_ids) + step for state in states]
    return sampler.sample(make_rows(logits), [state.slot for state in states], positions, masks)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 131, 49152])
def test_exactly_the_tokens_without_a_bit_are_forbidden(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = make_logits(3, vocab_size, rows=3)
    allowed = [np.flatnonzero(rng.random(vocab_size) < 0.5) for _ in range(2)]
    expected = logits.copy()
    for row, tokens in zip((0, 2), allowed, strict=True):
        expected[row] = -math.inf
        expected[row, tokens] = logits[row, tokens]
    rows = make_rows(logits)
    peaks = arithmetic().peaks(rows)
    masks = [mask_of(*map(int, tokens), vocab_size=vocab_size) for tokens in allowed]
    arithmetic().forbid(rows, peaks, [0, 2], masks)
    assert np.array_equal(make_array(rows), expected)
    assert peaks.values.tolist() == expected.max(axis=1).tolist()
    assert peaks.token_ids.tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_p": 0.3, "top_k": 2, "min_p": 0.1},
        {"temperature": 1.0, "logit_bias": {5: 100.0}},
        {"temperature": 0.0, "logit_bias": {5: 100.0}, "frequency_penalty": -2.0, "repetition_penalty": 0.1},
    ],
)
def test_whatever_else_is_asked_a_forbidden_token_is_never_drawn(params):
    for seed in range(40):
        state = make_state(seed=seed, output=(5, 5, 5), **params)
        [found] = sample([state], make_logits(seed, VOCAB, rows=1), {0: mask_of(2, 64, 130)})
        assert found.token_id in (2, 64, 130)


def test_greedy_takes_the_best_of_the_allowed():
    logits = make_logits(1, VOCAB, rows=1)
    allowed = [3, 77, 100, 128]
    [found] = sample([make_state(temperature=0.0)], logits, {0: mask_of(*allowed)})
    assert found.token_id == max(allowed, key=lambda token: logits[0, token])


def test_allowed_tokens_are_drawn_as_their_renormalised_probabilities_say():
    logits = np.tile(make_logits(8, VOCAB, scale=1.0, rows=1), (1500, 1))
    allowed = [1, 40, 63, 64, 129]
    weights = np.exp(logits[0, allowed].astype(np.float64))
    states = [make_state(slot, seed=slot) for slot in range(1500)]
    drawn = Counter(found.token_id for found in sample(states, logits, dict.fromkeys(range(1500), mask_of(*allowed))))
    assert set(drawn) <= set(allowed)
    assert chisquare([drawn[token] for token in allowed], 1500 * weights / weights.sum()).pvalue > 1e-4


def test_rows_without_a_mask_are_bit_equal_to_a_batch_without_any():
    spec = LogprobSpec(top=3)
    states = [make_state(slot, seed=slot, logprobs=spec, temperature=0.9, top_p=0.8) for slot in range(5)]
    logits = make_logits(2, VOCAB, rows=5)
    plain = sample(states, logits, {})
    masked = sample(states, logits, {1: mask_of(7), 3: mask_of(*range(9))})
    assert [masked[row] for row in (0, 2, 4)] == [plain[row] for row in (0, 2, 4)]
    assert masked[1].token_id == 7


def test_log_probabilities_are_those_of_the_masked_distribution_and_forbidden_tokens_have_none():
    logits = make_logits(2, VOCAB, rows=1)
    state = make_state(logprobs=LogprobSpec(top=4, token_ids=(5, 9)))
    [found] = sample([state], logits, {0: mask_of(5, 6, 100)})
    weights = {token: math.exp(float(logits[0, token])) for token in (5, 6, 100)}
    values = {token: math.log(weight / math.fsum(weights.values())) for token, weight in weights.items()}
    assert found.logprobs.token[0] == pytest.approx(values[found.token_id], abs=1e-6)
    assert {token for value, token in found.logprobs.top if value != LEAST_LOGPROB} == set(values)
    assert found.logprobs.token_ids[0][0] == pytest.approx(values[5], abs=1e-6)
    assert found.logprobs.token_ids[1] == (LEAST_LOGPROB, 9)


def test_where_mask_and_other_stages_together_leave_nothing_the_row_says_so_and_draws_nothing():
    early = make_state(0, ends=(7,), min_new_tokens=5)
    late = make_state(1, ends=(7,), min_new_tokens=5, output=(1, 2, 3, 4, 5))
    found = sample([early, late], make_logits(4, VOCAB, rows=2), {0: mask_of(7), 1: mask_of(7)})
    assert (found[0].token_id, found[0].error) == (None, NOTHING_TO_DRAW)
    assert found[1].token_id == 7


def test_an_empty_mask_never_yields_a_token():
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}):
        [found] = sample([make_state(**params)], make_logits(4, VOCAB, rows=1), {0: mask_of()})
        assert (found.token_id, found.error) == (None, NOTHING_TO_DRAW)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_wrong_numbers_are_noticed_even_where_the_mask_forbids_their_token(bad):
    logits = make_logits(4, VOCAB, rows=2)
    logits[0, 9] = bad
    found = sample([make_state(0), make_state(1)], logits, {0: mask_of(7), 1: mask_of(7)})
    assert (found[0].error, found[1].token_id) == (NAN_LOGITS, 7)


def test_tokens_that_were_not_drawn_count_in_the_penalties_once():
    def drawn(appended, output=()):
        sampler = make_sampler(1, VOCAB)
        sampler.set_slot(make_state(prompt=(1, 2), output=output, temperature=0.0, frequency_penalty=2.0))
        for start, tokens in appended:
            sampler.catch_up(0, start, tokens)
        logits = make_rows(make_logits(9, VOCAB, scale=0.5, rows=1))
        return sampler.sample(logits, [0], [6])[0].token_id

    best = drawn([])
    expected = drawn([], output=(best, best, 3, 4))
    assert expected != best
    assert drawn([(1, (2, best, best)), (4, (3, 4))]) == expected
    assert drawn([(0, (1, 2, best, best, 3, 4)), (0, (1, 2, best)), (2, (best, best, 3, 4))]) == expected
    assert drawn([(4, (3, 4))], output=(best, best)) == expected


def test_the_mask_comes_after_custom_processors_and_what_both_forbid_is_never_drawn():
    def drawn(allowed, disallowed):
        state = make_state(temperature=0.0, custom_params={"token_ids": list(disallowed)})
        state = msgspec.structs.replace(state, processor="disallowed_tokens")
        sampler = make_sampler(1, VOCAB, CustomProcessors(load_registered(())))
        sampler.set_slot(state)
        logits = make_rows(make_logits(6, VOCAB, rows=1))
        return sampler.sample(logits, [0], [3], {0: mask_of(*allowed)})[0]

    assert drawn({4, 9}, {9}).token_id == 4
    assert drawn({4, 9}, {4}).token_id == 9
    assert drawn({4, 9}, {4, 9}).error == NOTHING_TO_DRAW
