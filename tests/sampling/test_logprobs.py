import math

import msgspec
import numpy as np
import pytest
from arithmetics import make_array, make_rows, make_sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import kept_probabilities, log_softmax, make_logits, make_state, processed_logits

from tureen.contract.types import LEAST_LOGPROB, LogprobSpec

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 300


def _sampled(logits, *states, vocab_size=VOCAB):
    """What sample() reports for rows [rows, vocab], row i belonging to states[i]."""
    sampler = make_sampler(len(states), vocab_size)
    for state in states:
        sampler.set_slot(state)
    positions = [len(state.prompt_ids) + len(state.output_ids) for state in states]
    return sampler.sample(make_rows(logits), [state.slot for state in states], positions)


def _scored(logits, targets, spec):
    sampler = make_sampler(1, logits.shape[1])
    sampler.set_slot(make_state(logprobs=spec, temperature=0.3, frequency_penalty=2.0, logit_bias={1: 50.0}))
    return sampler.score(make_rows(logits), 0, targets, 1)


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    penalty=st.floats(-2, 2),
    top=st.one_of(st.integers(0, 20), st.just(VOCAB)),
    asked=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    mode=st.sampled_from(["processed", "raw"]),
)
@settings(max_examples=100, deadline=None)
def test_output_logprobs_equal_float64(seed, temperature, penalty, top, asked, mode):
    spec = LogprobSpec(top=top, token_ids=tuple(asked), mode=mode, entropy_start=3, support=True)
    state = make_state(
        output=(5, 6, 6), temperature=temperature, frequency_penalty=penalty, top_p=0.8, top_k=40, logprobs=spec
    )
    logits = make_logits(seed, VOCAB, grid=0.25)
    source = logits if mode == "raw" else processed_logits(logits, state)
    expected = log_softmax(source, 1.0 if mode == "raw" or temperature == 0 else temperature)
    order = np.lexsort((np.arange(VOCAB), -source))
    [output] = _sampled(logits[None], state)
    report = output.logprobs
    assert report.token[1] == output.token_id
    assert [token for _, token in report.top or ()] == order[:top].tolist()
    assert [token for _, token in report.token_ids or ()] == asked
    assert (report.top is None) == (top == 0)
    assert (report.token_ids is None) == (not asked)
    for value, token in (report.token, *(report.top or ()), *(report.token_ids or ())):
        assert value == pytest.approx(expected[token], abs=1e-9)
    assert report.entropy == pytest.approx(-math.fsum(np.exp(expected) * expected), abs=1e-9)
    if temperature == 0:
        assert (report.support, report.share) == (None, None)
        return
    kept, margin = kept_probabilities(processed_logits(logits, state), state.params)
    if margin > 1e-9:
        assert list(report.support) == np.flatnonzero(kept).tolist()
        assert report.share == pytest.approx(math.log(kept[output.token_id] / math.fsum(kept)), abs=1e-9)


def test_only_those_that_ask_get_the_entropy_and_the_tokens_that_could_be_drawn():
    asked = {"support": True}
    specs = [LogprobSpec(), LogprobSpec(entropy_start=3), *(LogprobSpec(**asked) for _ in range(3))]
    cuts = [{"top_k": 5}, {"top_k": 5}, {"top_k": 3}, {}, {"top_k": 9}]
    states = [make_state(slot, logprobs=spec, **cuts[slot]) for slot, spec in enumerate(specs)]
    logits = make_logits(0, VOCAB, rows=5)
    logits[:, 7] = -np.inf
    reports = [output.logprobs for output in _sampled(logits, *states)]
    assert [report.entropy is not None for report in reports] == [False, True, False, False, False]
    assert [len(report.support or ()) for report in reports] == [0, 0, 3, 0, 9]
    expected = [value for value in log_softmax(logits[1]) if math.isfinite(value)]
    assert reports[1].entropy == pytest.approx(-math.fsum(math.exp(value) * value for value in expected))


def test_rows_of_a_batch_report_only_what_each_asked():
    logits = make_logits(0, VOCAB, rows=4)
    specs = [
        None,
        LogprobSpec(),
        LogprobSpec(top=3, mode="raw"),
        LogprobSpec(top=1, token_ids=(8, 2)),
    ]
    states = [make_state(slot, logprobs=spec, output=(4,), presence_penalty=1.0) for slot, spec in enumerate(specs)]
    reports = [output.logprobs for output in _sampled(logits, *states)]
    assert reports[0] is None
    assert (reports[1].top, reports[1].token_ids) == (None, None)
    assert (len(reports[2].top), reports[2].token_ids) == (3, None)
    assert (len(reports[3].top), [token for _, token in reports[3].token_ids]) == (1, [8, 2])


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=20, deadline=None)
def test_both_kinds_of_logprobs_are_those_that_each_mode_gives(seed, temperature):
    def reported(mode):
        spec = LogprobSpec(top=3, token_ids=(8, 2), mode=mode)
        return make_state(output=(4,), temperature=temperature, presence_penalty=1.0, logprobs=spec)

    logits = make_logits(seed, VOCAB)
    reports = {mode: _sampled(logits[None], reported(mode))[0].logprobs for mode in ("processed", "raw", "both")}
    assert reports["both"].raw == reports["raw"]
    assert msgspec.structs.replace(reports["both"], raw=None) == reports["processed"]


def test_asking_for_logprobs_changes_no_token():
    logits = make_logits(0, VOCAB, rows=2, scale=0.5)
    for mode in ("raw", "processed"):
        asking = [
            make_state(slot, seed=slot, logprobs=LogprobSpec(top=3, mode=mode), output=(1,), presence_penalty=1.0)
            for slot in range(2)
        ]
        silent = [msgspec.structs.replace(state, logprobs=None) for state in asking]
        assert [o.token_id for o in _sampled(logits, *asking)] == [o.token_id for o in _sampled(logits, *silent)]


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0, 3.0])
def test_the_probabilities_of_all_tokens_sum_to_one(temperature):
    state = make_state(temperature=temperature, top_k=2, logprobs=LogprobSpec(top=VOCAB))
    [output] = _sampled(make_logits(0, VOCAB, rows=1), state)
    assert math.fsum(math.exp(value) for value, _ in output.logprobs.top) == pytest.approx(1.0, abs=1e-12)


def test_a_forbidden_token_has_the_least_logprob_and_json_has_no_infinity():
    state = make_state(ends=(3,), min_new_tokens=1, logprobs=LogprobSpec(top=VOCAB, token_ids=(3,)))
    logits = make_logits(0, VOCAB, rows=1)
    logits[0, 7] = -np.inf
    [output] = _sampled(logits, state)
    assert output.logprobs.token_ids == ((LEAST_LOGPROB, 3),)
    assert output.logprobs.top[-2:] == ((LEAST_LOGPROB, 3), (LEAST_LOGPROB, 7))
    assert all(math.isfinite(value) for value, _ in output.logprobs.top[:-2])
    assert b"[-9999.0,3]" in msgspec.json.encode(output.logprobs)


def test_more_alternatives_than_tokens_gives_all_tokens():
    [output] = _sampled(make_logits(0, 7, rows=1), make_state(logprobs=LogprobSpec(top=128)), vocab_size=7)
    assert len(output.logprobs.top) == 7


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0, 1e4])
def test_prompt_logprobs_equal_float64_on_a_real_vocabulary(scale):
    vocab_size = 49_152
    logits = make_logits(1, vocab_size, scale=scale, rows=20)
    targets = np.random.default_rng(2).integers(0, vocab_size, 20).tolist()
    reports = _scored(logits, targets, LogprobSpec(prompt_start=0, top=2, token_ids=(9,)))
    assert len(reports) == 20
    for row, target, report in zip(logits, targets, reports, strict=True):
        expected = log_softmax(row)
        best = np.lexsort((np.arange(vocab_size), -row))[:2].tolist()
        assert [token for _, token in (report.token, *report.top, *report.token_ids)] == [target, *best, 9]
        for value, token in (report.token, *report.top, *report.token_ids):
            assert value == pytest.approx(expected[token], rel=1e-12, abs=1e-9)


def test_prompt_logprobs_do_not_depend_on_how_many_positions_come_together():
    logits = make_logits(1, 5000, rows=40)
    targets = list(range(40))
    spec = LogprobSpec(top=4)
    together = _scored(logits, targets, spec)
    for chunk in (1, 7, 16):
        pieces = [_scored(logits[i : i + chunk], targets[i : i + chunk], spec) for i in range(0, 40, chunk)]
        assert tuple(report for piece in pieces for report in piece) == together


def test_scoring_leaves_the_logits_and_the_slot_as_they_were():
    sampler = make_sampler(1, VOCAB)
    state = make_state(seed=1, logprobs=LogprobSpec(), frequency_penalty=1.0)
    sampler.set_slot(state)
    logits = make_rows(make_logits(0, VOCAB, rows=2))
    before = make_array(logits)
    sampler.score(logits, 0, [4, 5], 1)
    assert np.array_equal(make_array(logits), before)
    assert sampler._slots[0].output.ids.tolist() == []


@pytest.mark.parametrize(("position", "num_without"), [(1, 4), (4, 1), (5, 0), (9, 0), (0, 5), (-40, 40)])
def test_tokens_have_an_entropy_from_the_position_that_is_asked_for(position, num_without):
    sampler = make_sampler(1, VOCAB)
    sampler.set_slot(make_state(logprobs=LogprobSpec(prompt_start=0, entropy_start=5)))
    logits = make_logits(0, VOCAB, rows=40)
    reports = sampler.score(make_rows(logits), 0, [5] * 40, position)
    assert [report.entropy is None for report in reports] == [True] * num_without + [False] * (40 - num_without)
    if num_without < 40:
        expected = log_softmax(logits[-1])
        assert reports[-1].entropy == pytest.approx(-math.fsum(np.exp(expected) * expected))


def test_nothing_to_score_gives_nothing():
    assert _scored(np.zeros((0, VOCAB), dtype=np.float32), [], LogprobSpec()) == ()


def test_prompt_positions_with_bad_logits_have_no_values():
    logits = make_logits(0, VOCAB, rows=2)
    logits[0, 3] = np.nan
    assert _scored(logits, [1, 2], LogprobSpec(top=2)) is None
    [sound] = _scored(logits[1:], [2], LogprobSpec(top=2))
    assert math.isfinite(sound.token[0])
