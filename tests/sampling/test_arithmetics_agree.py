"""The sampler with the native kernels: the tokens that torch gives, the same bits with any threads, and no torch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from sampling_reference import make_logits, make_state

from tureen.contract.types import LogprobSpec
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.sampling.sampler import Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic

native = pytest.importorskip("tureen.kernels.cpu._native", reason="the native kernels are not built")

VOCAB, ROWS = 6000, 48
KINDS = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.8},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.999, "temperature": 2.5},
    {"top_k": 40},
    {"min_p": 0.02, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {5: 3.0}},
    {"min_new_tokens": 9, "temperature": 0.0},
)


def _make_states():
    specs = (None, LogprobSpec(top=3), LogprobSpec(top=2, token_ids=(7, 1), mode="raw"))
    return [
        make_state(
            slot,
            seed=slot,
            output=(slot, 5, 5),
            ends=(0, 4),
            logprobs=specs[slot // len(KINDS) % len(specs)],
            **KINDS[slot % len(KINDS)],
        )
        for slot in range(ROWS)
    ]


def _make_masks():
    rng = np.random.default_rng(1)
    return {slot: rng.integers(0, 2**32, -(-VOCAB // 32), dtype=np.uint32) for slot in range(0, ROWS, 4)}


def _sampled(arithmetic, states, logits, masks):
    sampler = Sampler(ROWS, VOCAB, arithmetic)
    for state in states:
        sampler.set_slot(state)
    positions = [len(state.prompt_ids) + len(state.output_ids) for state in states]
    rows = arithmetic.adopt(logits.copy())
    return sampler.sample(rows, [state.slot for state in states], positions, masks)


def _values(report):
    return [value for value, _ in (report.token, *(report.top or ()), *(report.token_ids or ()))]


def _tokens(report):
    return [token for _, token in (report.token, *(report.top or ()), *(report.token_ids or ()))]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_both_draw_the_same_tokens_and_report_the_same_log_probabilities(scale):
    states, logits, masks = _make_states(), make_logits(0, VOCAB, scale=scale, rows=ROWS), _make_masks()
    with_torch = _sampled(TorchArithmetic("cpu"), states, logits, masks)
    without = _sampled(NativeArithmetic(native.Pool(2)), states, logits, masks)
    assert [row.token_id for row in without] == [row.token_id for row in with_torch]
    for one, other in zip(without, with_torch, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None:
            assert _tokens(one.logprobs) == _tokens(other.logprobs)
            assert _values(one.logprobs) == [
                None if value is None else pytest.approx(value, abs=1e-12) for value in _values(other.logprobs)
            ]


def test_threads_and_the_rows_beside_change_no_bit():
    states, logits, masks = _make_states(), make_logits(2, VOCAB, scale=1.0, rows=ROWS), _make_masks()
    one, two = NativeArithmetic(native.Pool(1)), NativeArithmetic(native.Pool(2))
    whole = _sampled(one, states, logits, masks)
    assert _sampled(two, states, logits, masks) == whole
    for part in (slice(0, 1), slice(5, 6), slice(20, 37)):
        of_part = {row - part.start: mask for row, mask in masks.items() if part.start <= row < part.stop}
        assert _sampled(two, states[part], logits[part], of_part) == whole[part]


def test_a_batch_of_plain_greedy_rows_equals_these_rows_among_others():
    plain = [make_state(slot, temperature=0.0) for slot in range(6)]
    asking = make_state(6, temperature=0.0, logprobs=LogprobSpec())
    logits = make_logits(3, VOCAB, grid=0.5, rows=7)
    logits[1, 50], logits[2, 60], logits[3] = np.nan, np.inf, -np.inf
    masks = {0: np.full(-(-VOCAB // 32), 0x55555555, dtype=np.uint32), 4: np.zeros(-(-VOCAB // 32), dtype=np.uint32)}
    for arithmetic in (TorchArithmetic("cpu"), NativeArithmetic(native.Pool(1))):
        for given in (masks, {}):
            mixed = _sampled(arithmetic, [*plain, asking], logits, given)
            assert _sampled(arithmetic, plain, logits[:6], given) == mixed[:6]
            assert [row.error is None for row in mixed] == [True, False, False, False, not given, True, True]


def test_of_tokens_that_are_heard_of_only_those_that_were_not_drawn_count():
    sampler = Sampler(1, VOCAB, NativeArithmetic(native.Pool(1)))
    sampler.set_slot(make_state(temperature=0.0, frequency_penalty=0.5, prompt=(1, 2)))
    drawn = [sampler.sample(make_logits(at, VOCAB, rows=1), [0], [at])[0].token_id for at in (2, 3)]
    sampler.catch_up(0, 3, (drawn[1], 9))  # position 3 was drawn, 4 was not
    counts = sampler._slots[0].output
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter((*drawn, 9))
