import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import make_logits

from tureen.sampling import probability
from tureen.sampling.probability import BLOCK, best_keys, draw, in_blocks, key_tokens, peak_tokens, rank_keys

SIZES = (1, 2, 255, 256, 257, 1000, 66_000)


def _order(logits):
    return np.lexsort((np.arange(len(logits)), -logits))


@pytest.mark.parametrize("size", SIZES)
def test_running_sums_are_prefix_sums(size):
    values = np.random.default_rng(0).random((3, size))
    result = probability.running_sums(torch.from_numpy(values))
    np.testing.assert_allclose(result.numpy(), np.cumsum(values, axis=1), rtol=1e-12)


def test_a_running_sum_does_not_depend_on_the_width_or_on_the_other_rows():
    values = torch.rand((4, 70_000), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = probability.running_sums(values)
    for width in (1, 100, 256, 300, 5000, 65_536, 65_537):
        assert torch.equal(probability.running_sums(values[1:2, :width])[0], whole[1, :width])


def test_a_rows_softmax_weights_are_bit_equal_alone_and_in_any_batch():
    for vocab_size in (77, 1000, 49_152):
        logits = torch.from_numpy(make_logits(1, vocab_size, rows=31))
        temperatures = torch.linspace(0.3, 2, 31, dtype=torch.float64)
        whole = probability.softmax_weights(logits, logits.amax(1), temperatures)
        for first, last in ((0, 1), (30, 31), (7, 8), (3, 20)):
            rows = slice(first, last)
            part = probability.softmax_weights(logits[rows], logits[rows].amax(1), temperatures[rows])
            assert torch.equal(part.blocks, whole.blocks[rows])
            assert torch.equal(part.totals, whole.totals[rows])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [None, 1.0])
def test_the_ranking_is_by_logit_and_then_by_lower_id(size, grid):
    logits = make_logits(2, size, grid=grid, rows=2)
    keys = rank_keys(torch.from_numpy(logits))
    for width in (1, 7, 256, size):
        ranked = key_tokens(best_keys(keys, width), size).numpy()
        for row in range(2):
            assert np.array_equal(ranked[row], _order(logits[row])[:width])


def test_special_values_rank_as_numbers_do():
    logits = np.array([[-0.0, 0.0, -math.inf, 3e38, -3e38, 1e-45, -1e-45, -0.0]], dtype=np.float32)
    keys = rank_keys(torch.from_numpy(logits))
    assert key_tokens(best_keys(keys, 8), 8)[0].tolist() == [3, 5, 0, 1, 7, 6, 4, 2]


@pytest.mark.parametrize("size", [5, 300, 512, 49_152])
def test_the_peak_token_is_the_lowest_id_among_equals(size):
    logits = make_logits(3, size, grid=2.0, rows=8)
    result = peak_tokens(torch.from_numpy(logits), torch.from_numpy(logits.max(axis=1)))
    assert result.tolist() == np.argmax(logits, axis=1).tolist()


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 3, 255, 256, 257, 700]),
    share=st.sampled_from([0.001, 0.1, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200)
def test_a_draw_is_the_inverse_of_the_running_sum_and_never_a_token_without_weight(seed, size, share, uniform):
    rng = np.random.default_rng(seed)
    weights = rng.random(size) * (rng.random(size) < share)
    weights[rng.integers(size)] = 1.0
    token = int(draw(in_blocks(torch.from_numpy(weights)[None]), torch.tensor([uniform], dtype=torch.float64))[0])
    assert weights[token] > 0
    ends = np.concatenate(([0.0], np.cumsum(weights))) / math.fsum(weights)
    assert ends[token] - 1e-12 <= uniform <= ends[token + 1] + 1e-12


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(0.0, 1), 0.5, math.nextafter(1.0, 0)])
def test_the_ends_of_the_interval_draw_tokens_with_weight(uniform):
    weights = torch.zeros((4, 3 * BLOCK), dtype=torch.float64)
    weights[0, 5] = 1.0
    weights[1, 2 * BLOCK + 1] = 1e-300
    weights[2, BLOCK - 1] = weights[2, BLOCK] = 1.0
    weights[3] = 1.0
    tokens = draw(in_blocks(weights), torch.full((4,), uniform, dtype=torch.float64)).tolist()
    assert (weights[range(4), tokens] > 0).all()
    expected = {0.0: [5, 2 * BLOCK + 1, BLOCK - 1, 0], 0.5: [5, 2 * BLOCK + 1, BLOCK, 3 * BLOCK // 2]}
    if uniform in expected:
        assert tokens == expected[uniform]
    if uniform > 0.9:
        assert tokens == [5, 2 * BLOCK + 1, BLOCK, 3 * BLOCK - 1]


def test_numbers_at_every_boundary_draw_the_token_that_begins_there():
    weights = torch.ones((1, 4), dtype=torch.float64)
    for quarter in range(4):
        assert draw(in_blocks(weights), torch.tensor([quarter / 4])).tolist() == [quarter]


def test_rounding_in_running_sums_draws_no_token_without_weight():
    ends = torch.tensor([[1.0, 1.5, 1.4], [1.0, 2.0, 2.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([1.3, 2.0], dtype=torch.float64)
    assert probability._first_above(ends, targets, weights).tolist() == [[2], [1]]
