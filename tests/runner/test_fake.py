import math

import pytest

from tureen.contract.params import SamplingParams
from tureen.contract.runner import NAN_LOGITS, Batch, Capacity, Row, SlotState
from tureen.contract.types import LogprobSpec
from tureen.errors import NotFound
from tureen.runner.fake import FakeRunner

CAPACITY = Capacity(num_pages=8, page_size=4, max_rows=4, vocab_size=100, context_len=32)


def _state(slot=0, output_ids=(), seed=3, logprobs=None, **params):
    params.setdefault("temperature", 1.0)
    return SlotState(slot, SamplingParams(**params), seed, (1, 2, 3), output_ids, (7,), logprobs)


def _row(token_ids=(1, 2, 3), start=0, pages=(0, 1), sample=True, slot=0, **fields):
    return Row(slot, tuple(token_ids), start, tuple(pages), sample, **fields)


def _one(runner, row, *states):
    return runner.run(Batch((row,), states)).rows[0]


def _token(*, pages=(0, 1), runner=None, **state):
    return _one(runner or FakeRunner(CAPACITY), _row(pages=pages), _state(**state)).token_ids


def test_the_same_row_gives_the_same_token_in_any_pages():
    assert _token() == _token() == _token(pages=(5, 2))


def test_seed_prompt_and_earlier_output_change_the_token():
    tokens = {
        _token(),
        _token(seed=4),
        _token(output_ids=(1,)),
        _one(FakeRunner(CAPACITY), _row((1, 2, 4)), _state()).token_ids,
    }
    assert len(tokens) == 4


def test_the_seed_does_not_matter_to_greedy():
    assert _token(seed=1, temperature=0.0) == _token(seed=2, temperature=0.0)


def test_pieces_give_the_same_token_as_the_whole():
    whole = _one(FakeRunner(CAPACITY), _row(range(6)), _state()).token_ids
    runner = FakeRunner(CAPACITY)
    assert _one(runner, _row(range(2), sample=False), _state()).token_ids == ()
    assert _one(runner, _row(range(2, 6), start=2)).token_ids == whole


def test_a_wrong_page_anywhere_changes_the_token():
    runner = FakeRunner(CAPACITY)
    _one(runner, _row(range(9), pages=(0, 1, 2), sample=False), _state())
    right = _one(runner, _row([9], start=9, pages=(0, 1, 2)), _state()).token_ids
    for pages in ((3, 1, 2), (0, 3, 2), (1, 0, 2)):
        assert _one(runner, _row([9], start=9, pages=pages), _state()).token_ids != right


def test_logprobs_are_finite_and_as_asked():
    spec = LogprobSpec(prompt_start=0, top=3, token_ids=(5, 6))
    row = _row(score_from=1, score_targets=(3, 9))
    output = _one(FakeRunner(CAPACITY), row, _state(logprobs=spec))
    assert [position.token[1] for position in output.scores] == [3, 9]
    for position in (*output.scores, *output.logprobs):
        values = [position.token, *position.top, *position.token_ids]
        assert all(math.isfinite(value) and value < 0 for value, _ in values)
        assert list(position.top) == sorted(position.top, reverse=True)
        assert [token_id for _, token_id in position.token_ids] == [5, 6]
    assert _one(FakeRunner(CAPACITY), _row(), _state()).logprobs == ()


def test_end_tokens_are_not_drawn_before_min_new_tokens():
    runner = FakeRunner(CAPACITY, choose=lambda token, state, outputs: 7)
    state = _state(min_new_tokens=1)
    assert _one(runner, _row(), state).token_ids == (8,)
    assert _one(runner, _row([8], start=3)).token_ids == (7,)


def test_a_fault_raises_before_anything_is_done():
    runner = FakeRunner(CAPACITY, fault=lambda call, row: "raise" if call == 0 else None)
    with pytest.raises(RuntimeError, match="scripted fault in call 0"):
        _one(runner, _row(), _state())
    assert _one(runner, _row(), _state()).token_ids == _token()


def test_poison_spreads_to_all_that_reads_it():
    runner = FakeRunner(CAPACITY, fault=lambda call, row: "poison" if call == 0 else None)
    assert _one(runner, _row(range(4), sample=False), _state()).error is None
    assert _one(runner, _row([4, 5], start=4), _state()).error == NAN_LOGITS
    assert _one(runner, _row([4], start=4, sample=False, score_targets=(9,)), _state()).error == NAN_LOGITS
    assert _one(runner, _row(range(4), pages=(2,)), _state()).error is None


def test_operations():
    runner = FakeRunner(CAPACITY)
    assert runner.call("device")["name"] == "fake"
    with pytest.raises(NotFound):
        runner.call("nonsense")
    runner.close()
