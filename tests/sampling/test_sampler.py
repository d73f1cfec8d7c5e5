import math

import msgspec
import numpy as np
import pytest
import torch
from arithmetics import make_rows, make_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import either
from sampling_reference import draw, make_logits, make_state

from tureen.contract.runner import NAN_LOGITS
from tureen.contract.types import NO_TOKEN, LogprobSpec
from tureen.sampling.random import uniform
from tureen.sampling.sampler import Draw, Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 300

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 1, 2, 50, 299, 300, 10_000]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "typical_p": st.sampled_from([1e-9, 0.2, 0.9, 1.0]),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0, 2),
        "min_new_tokens": st.integers(0, 20),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    },
)


def _sample(sampler, logits, states):
    """One step: every state's next token."""
    positions = [len(state.prompt_ids) + len(state.output_ids) for state in states]
    return sampler.sample(make_rows(logits), [state.slot for state in states], positions)


def _sampler(*states, vocab_size=VOCAB):
    sampler = make_sampler(max(state.slot for state in states) + 1, vocab_size)
    for state in states:
        sampler.set_slot(state)
    return sampler


@given(data=st.data(), seed=st.integers(0, 10**6), grid=st.sampled_from([None, 0.5]), num_rows=st.integers(1, 5))
@pytest.mark.sampled
@settings(max_examples=either(150, 40), deadline=None)
def test_the_whole_sampler_equals_a_float64_reference_given_the_same_uniform_number(data, seed, grid, num_rows):
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=10)
    states = [
        make_state(
            slot,
            seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
            prompt=data.draw(tokens),
            output=data.draw(tokens),
            ends=(0, 7),
            **data.draw(PARAMS),
        )
        for slot in range(num_rows)
    ]
    logits = make_logits(seed, VOCAB, grid=grid, rows=num_rows)
    outputs = _sample(_sampler(*states), logits, states)
    for row, state, output in zip(logits, states, outputs, strict=True):
        number = uniform([state.seed], [len(state.prompt_ids) + len(state.output_ids)])[0]
        token, margin = draw(row, state, number)
        assert output.error is None
        if margin > 1e-12:
            assert output.token_id == token


@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.95},
        {"top_p": 0.2},
        {"top_k": 255},
        {"top_k": 256},
        {"top_k": 257},
        {"top_k": 4096},
        {"top_k": 9000},
        {"min_p": 1e-4},
        {"typical_p": 0.5},
        {"typical_p": 0.9, "top_k": 257},
        {"top_p": 0.99, "min_p": 1e-5, "top_k": 5000},
    ],
)
def test_a_real_vocabulary_equals_the_reference_however_far_the_cuts_reach(params, scale):
    vocab_size = 12_345
    states = [make_state(slot, seed=slot, **params) for slot in range(3)]
    logits = make_logits(5, vocab_size, scale=scale, grid=0.01, rows=3)
    outputs = _sample(_sampler(*states, vocab_size=vocab_size), logits, states)
    expected = [draw(row, state, uniform([state.seed], [3])[0]) for row, state in zip(logits, states, strict=True)]
    assert min(margin for _, margin in expected) > 1e-12
    assert [output.token_id for output in outputs] == [token for token, _ in expected]


def test_one_row_is_bit_equal_alone_and_among_thirty_others():
    spec = LogprobSpec(top=5, token_ids=(3, 1))
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 400, "temperature": 1.7},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"typical_p": 0.4},
        {"typical_p": 0.7, "top_k": 300},
        {"frequency_penalty": 0.5, "top_p": 0.999},
        {"presence_penalty": -1.0, "logit_bias": {5: 3.0}},
    ]
    vocab_size = 4000
    states = [
        make_state(slot, seed=slot, output=(slot, 5), logprobs=spec, **kinds[slot % len(kinds)]) for slot in range(31)
    ]
    together, logits = _sampler(*states, vocab_size=vocab_size), make_logits(9, vocab_size, scale=1.0, rows=31)
    outputs = _sample(together, logits, states)
    for row, state in enumerate(states):
        alone = _sampler(state, vocab_size=vocab_size)
        assert _sample(alone, logits[row : row + 1], [state]) == [outputs[row]]
    order = np.random.default_rng(0).permutation(31)
    shuffled = _sample(_sampler(*states, vocab_size=vocab_size), logits[order], [states[i] for i in order])
    assert shuffled == [outputs[i] for i in order]


def test_the_number_drawn_depends_on_seed_and_position_alone():
    logits = np.zeros((1, VOCAB), dtype=np.float32)  # token = floor(uniform * vocab)
    state = make_state(seed=11, prompt=(1,) * 9)
    for position in (9, 10, 500):
        sampler = _sampler(state)
        [output] = sampler.sample(make_rows(logits), [0], [position])
        assert output.token_id == int(uniform([11], [position])[0] * VOCAB)


def test_a_seed_beyond_int64_is_taken_modulo_two_to_the_64th():
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    states = [make_state(0, seed=2**63), make_state(1, seed=-(2**63))]
    first, second = _sample(_sampler(*states), logits, states)
    assert first == second


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [9, 200]] = 1.0
    state = make_state(temperature=0.0)
    assert _sample(_sampler(state), logits, [state]) == [Draw(token_id=9)]


def test_greedy_takes_the_first_token_where_it_is_the_best():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 0] = 1.0
    state = make_state(temperature=0.0)
    assert _sample(_sampler(state), logits, [state]) == [Draw(token_id=0)]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_k": 4}], ids=str)
def test_at_the_border_of_two_tokens_the_higher_is_drawn(params, monkeypatch):
    logits = np.full((8, 5), -np.inf, dtype=np.float32)
    logits[:, [1, 2, 3, 4]] = 0.0
    states = [make_state(slot, **params) for slot in range(8)]
    monkeypatch.setattr("tureen.sampling.random.uniform", lambda *_: np.arange(8) / 8)
    outputs = _sample(_sampler(*states, vocab_size=5), logits, states)
    assert [output.token_id for output in outputs] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e-6])
def test_a_vanishing_temperature_takes_the_best_token(temperature):
    logits = make_logits(0, VOCAB, rows=1)
    state = make_state(temperature=temperature)
    assert _sample(_sampler(state), logits, [state]) == [Draw(token_id=int(logits.argmax()))]


def test_an_enormous_temperature_draws_from_all_tokens_alike():
    state = make_state(seed=3, temperature=1.7e308)
    [output] = _sample(_sampler(state), make_logits(0, VOCAB, rows=1), [state])
    assert output.token_id == int(uniform([3], [3])[0] * VOCAB)


def test_equal_logits_are_cut_by_id():
    logits = np.zeros((300, 2000), dtype=np.float32)
    for params, num_kept in (({"top_k": 3}, 3), ({"top_k": 700}, 700), ({"top_p": 0.0499}, 100)):
        states = [make_state(slot, seed=slot, **params) for slot in range(300)]
        drawn = {output.token_id for output in _sample(_sampler(*states, vocab_size=2000), logits, states)}
        assert max(drawn) < num_kept
        assert max(drawn) > num_kept * 0.9 - 1


# State


def _generate(sampler, state, all_logits):
    """Tokens drawn one after the other for one slot; all_logits [steps, vocab]."""
    start = len(state.prompt_ids) + len(state.output_ids)
    return [
        sampler.sample(make_rows(row[None]), [state.slot], [start + step])[0].token_id
        for step, row in enumerate(all_logits)
    ]


PENALISED = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.4, "min_new_tokens": 6}


def test_penalties_follow_the_tokens_drawn():
    logits = make_logits(4, VOCAB, scale=0.3, rows=40)
    state = make_state(seed=1, ends=(0,), **PENALISED)
    drawn = _generate(_sampler(state), state, logits)
    for step in range(40):
        at_step = msgspec.structs.replace(state, output_ids=tuple(drawn[:step]))
        assert drawn[step] == draw(logits[step], at_step, uniform([1], [3 + step])[0])[0]


def test_a_preempted_sequence_resumes_with_the_state_of_an_undisturbed_one():
    logits = make_logits(4, VOCAB, scale=0.3, rows=60)
    state = make_state(seed=1, ends=(0,), **PENALISED)
    undisturbed = _generate(_sampler(state), state, logits)
    for cut in (1, 7, 30, 59):
        sampler = make_sampler(3, VOCAB)
        sampler.set_slot(state)
        before = _generate(sampler, state, logits[:cut])
        sampler.set_slot(make_state(0, frequency_penalty=1.0))  # somebody else's, in between
        resumed = msgspec.structs.replace(state, slot=2, output_ids=tuple(before))
        sampler.set_slot(resumed)
        assert before + _generate(sampler, resumed, logits[cut:]) == undisturbed


def test_a_slot_taken_again_carries_nothing_over():
    logits = make_logits(6, VOCAB, scale=0.3, rows=30)
    first = make_state(seed=1, prompt=range(50), logit_bias={5: 50.0}, logprobs=LogprobSpec(), **PENALISED)
    sampler = _sampler(first)
    _generate(sampler, first, logits)
    for second in (make_state(seed=2), make_state(seed=2, **PENALISED), make_state(seed=2, presence_penalty=1.0)):
        sampler.set_slot(second)
        assert _generate(sampler, second, logits) == _generate(_sampler(second), second, logits)


def test_sequences_that_share_a_batch_do_not_mix_their_counts():
    logits = make_logits(8, VOCAB, scale=0.2, rows=25)
    states = [make_state(slot, seed=slot, prompt=(slot,), **PENALISED) for slot in range(3)]
    together = _sampler(*states)
    drawn = {slot: [] for slot in range(3)}
    for step, row in enumerate(logits):
        slots = [slot for slot in (2, 0, 1) if (step + slot) % 3]  # the batch changes at every step
        outputs = together.sample(
            make_rows(np.stack([row] * len(slots))), slots, [1 + len(drawn[slot]) for slot in slots]
        )
        for slot, output in zip(slots, outputs, strict=True):
            drawn[slot].append(output.token_id)
    for slot, state in enumerate(states):
        rows = [row for step, row in enumerate(logits) if (step + slot) % 3]
        assert _generate(_sampler(state), state, rows) == drawn[slot]


# Faults


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("places", [[0], [150], [VOCAB - 1], range(VOCAB)])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {**PENALISED, "logit_bias": {0: 1.0}}])
def test_a_row_with_a_bad_logit_fails_alone_and_keeps_its_state(bad, places, params):
    spec = LogprobSpec(top=2)
    states = [make_state(slot, seed=slot, ends=(0,), logprobs=spec, **params) for slot in range(3)]
    logits = make_logits(1, VOCAB, rows=3)
    clean = _sample(_sampler(*states), logits, states)
    faulty = logits.copy()
    faulty[1, list(places)] = bad
    sampler = _sampler(*states)
    outputs = _sample(sampler, faulty, states)
    assert outputs == [clean[0], Draw(error=NAN_LOGITS), clean[2]]
    assert _sample(sampler, logits[1:2], states[1:2]) == clean[1:2]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5}])
def test_a_row_where_nothing_may_be_drawn_fails_alone(params):
    states = [make_state(slot, **params) for slot in range(2)]
    logits = make_logits(1, VOCAB, rows=2)
    logits[0] = -math.inf
    outputs = _sample(_sampler(*states), logits, states)
    assert outputs[0] == Draw(error=NAN_LOGITS)
    assert outputs[1].error is None


def test_a_bad_logit_is_noticed_even_where_min_new_tokens_forbids_the_token():
    state = make_state(ends=(4,), min_new_tokens=1)
    logits = make_logits(1, VOCAB, rows=1)
    logits[0, 4] = math.nan
    assert _sample(_sampler(state), logits, [state]) == [Draw(error=NAN_LOGITS)]


def test_tokens_the_model_forbids_are_never_drawn():
    logits = make_logits(1, VOCAB, rows=1, scale=0.1)
    logits[0, 10:] = -math.inf
    for params in ({}, {"top_k": 20}, {"min_p": 1e-9}, {"temperature": 100.0}):
        states = [make_state(seed=seed, **params) for seed in range(50)]
        assert all(_sample(_sampler(s), logits, [s])[0].token_id < 10 for s in states)


def test_a_call_that_raises_leaves_no_trace():
    states = [make_state(slot, seed=slot, **PENALISED) for slot in range(2)]
    logits = make_logits(2, VOCAB, scale=0.2, rows=2)
    clean = _sample(_sampler(*states), logits, states)
    sampler = make_sampler(4, VOCAB)
    for state in states:
        sampler.set_slot(state)
    with pytest.raises(LookupError):  # the last slot was never set
        sampler.sample(make_rows(np.vstack((logits, logits[:1]))), [0, 1, 3], [3, 3, 3])
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(make_rows(np.zeros((2, VOCAB + 1))), [0, 1], [3, 3])
    assert _sample(sampler, logits, states) == clean


def test_an_empty_batch_draws_nothing():
    assert make_sampler(1, VOCAB).sample(make_rows(np.zeros((0, VOCAB))), [], []) == []


def test_half_precision_and_strided_logits_are_taken():
    state = make_state(seed=1, top_p=0.9)
    values = make_logits(0, VOCAB, rows=1).astype(np.float16)
    expected = _sampler(state).sample(make_rows(values), [0], [3])
    strided = make_rows(np.repeat(values, 2, axis=1))[:, ::2]
    half = values if isinstance(strided, np.ndarray) else torch.from_numpy(values)
    assert _sampler(state).sample(half, [0], [3]) == expected
    assert _sampler(state).sample(strided, [0], [3]) == expected


def test_a_sampler_without_penalties_keeps_no_counts():
    sampler = _sampler(make_state(prompt=range(200)))
    slot = sampler._slots[0]
    assert slot.output is None
    assert slot.seen is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_tokens_as_a_cpu():
    states = [
        make_state(slot, seed=slot, logprobs=LogprobSpec(top=3), **params)
        for slot, params in enumerate([{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 400}, PENALISED])
    ]
    logits = torch.from_numpy(make_logits(3, 49_152, rows=5))
    slots, positions = range(5), [3] * 5
    results = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(5, 49_152, TorchArithmetic(device))
        for state in states:
            sampler.set_slot(state)
        results.append(sampler.sample(logits.to(device, copy=True), slots, positions))
    assert [output.token_id for output in results[0]] == [output.token_id for output in results[1]]


def test_positions_given_as_embeddings_are_not_penalised():
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, VOCAB - 1], logits[0, 5] = 2.0, 1.9  # without a token there is none to divide, the last one neither
    state = make_state(prompt=(NO_TOKEN,) * 3, temperature=0.0, repetition_penalty=1.5)
    assert _sample(_sampler(state), logits, [state])[0].token_id == VOCAB - 1
    later = make_state(prompt=(NO_TOKEN,) * 3, output=(VOCAB - 1,), temperature=0.0, repetition_penalty=1.5)
    assert _sample(_sampler(later), logits, [later])[0].token_id == 5
