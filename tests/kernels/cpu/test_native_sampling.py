"""Rows of logits to tokens, against numpy's float64 and extended precision, and against sorting and counting."""

from __future__ import annotations

import math

import numpy as np
import pytest

native = pytest.importorskip("tureen.kernels.cpu._native")

SIZES = (1, 2, 31, 33, 63, 65, 255, 256, 257, 511, 513, 4097, 49_152, 151_936)
TEMPERATURES = (5e-324, 1e-310, 1e-30, 0.3, 1.0, 2.5, 1e9, 1.7e308)


@pytest.fixture(scope="module")
def pool():
    return native.Pool(2)


def _make_logits(size, rows=1, *, seed=0, scale=3.0, grid=None):
    logits = np.random.default_rng(seed).normal(0, scale, (rows, size))
    return (np.round(logits / grid) * grid if grid else logits).astype(np.float32)


def _make_mask(allowed):
    """allowed [vocab] bool, packed; bits beyond the vocabulary are set."""
    padded = np.concatenate((allowed, np.ones(-len(allowed) % 32, dtype=bool)))
    return np.packbits(padded, bitorder="little").view(np.uint32)


def _softmax_arguments(logits, temperature=1.0):
    """For all rows."""
    rows = np.arange(len(logits))
    return rows, logits.max(axis=1), np.full(len(logits), float(temperature))


def _exact_weights(row, temperature=1.0):
    """exp((logit - peak) / temperature) with 64 bits of precision, where the machine has them."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp((row.astype(np.longdouble) - np.longdouble(row.max())) / np.longdouble(temperature))


def _order(row):
    return np.lexsort((np.arange(len(row)), -row))


# ---- the largest logit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [None, 2.0])
def test_the_peak_is_the_lowest_token_among_the_largest(pool, size, grid):
    logits = _make_logits(size, 5, grid=grid)
    values, tokens = native.peaks(pool, logits)
    assert values.tolist() == logits.max(axis=1).tolist()
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert native.greedy(pool, logits, []) == tokens.tolist()


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([-0.0, 0.0, -1.0], 0),
        ([0.0, -0.0], 0),
        ([-1e-45, -0.0, 0.0], 1),
        ([1e-45, 3e-45, 0.0], 1),
        ([-3.4028235e38, -3.4e38], 1),
        ([3.4e38, 3.4028235e38], 1),
        ([-math.inf, -3.4028235e38], 1),
        ([-2.0, -1.0, -math.inf], 1),
    ],
)
def test_special_values_compare_as_numbers_do(pool, row, token):
    assert native.greedy(pool, np.array([row], dtype=np.float32), []) == [token]


@pytest.mark.parametrize("size", [1, 257, 513, 49_152])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_bad_logit_anywhere_is_noticed_in_its_row_alone(pool, size, bad):
    for place in {0, size // 2, size - 1}:
        logits = _make_logits(size, 3)
        logits[1, place] = np.copysign(np.float32(bad), np.float32(-1.0)) if bad is not math.inf else bad
        expected = [int(logits[0].argmax()), -1, int(logits[2].argmax())]
        assert native.greedy(pool, logits, []) == expected
        assert native.greedy(pool, logits, [_make_mask(np.arange(size) != place)] * 3)[1] == -1
        assert np.isfinite(native.peaks(pool, logits)[0]).tolist() == [True, False, True]


def test_a_row_of_minus_infinity_alone_has_no_token(pool):
    logits = np.full((1, 300), -math.inf, dtype=np.float32)
    assert native.greedy(pool, logits, []) == [-1]
    assert native.greedy(pool, logits, [_make_mask(np.zeros(300, dtype=bool))]) == [-1]
    assert np.isnan(native.peaks(pool, logits)[0]).all()


# ---- masks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_mask_leaves_exactly_the_tokens_with_a_bit(pool, size, share):
    rng = np.random.default_rng(size)
    logits = _make_logits(size, 4, grid=1.0)
    allowed = rng.random((2, size)) < share
    expected = logits.copy()
    expected[[0, 3]] = np.where(allowed, logits[[0, 3]], -np.inf)
    masks = [_make_mask(one) for one in allowed]
    tokens = [-2 if row.max() == -np.inf else int(row.argmax()) for row in expected]
    assert native.greedy(pool, logits, [masks[0], None, None, masks[1]]) == tokens
    values, found = native.forbid(pool, logits, np.array([0, 3]), masks)
    assert np.array_equal(logits, expected)
    assert values.tolist() == expected.max(axis=1)[[0, 3]].tolist()
    assert found.tolist() == expected.argmax(axis=1)[[0, 3]].tolist()


def test_a_forbidden_token_is_minus_infinity_whatever_it_was(pool):
    logits = np.array([[math.nan, math.inf, -math.inf, 1.0, 2.0]], dtype=np.float32)
    native.forbid(pool, logits, np.array([0]), [_make_mask(np.arange(5) == 3)])
    assert logits.tolist() == [[-math.inf, -math.inf, -math.inf, 1.0, -math.inf]]


def test_a_mask_for_a_smaller_vocabulary_is_refused(pool):
    logits = _make_logits(65)
    short = np.zeros(2, dtype=np.uint32)
    with pytest.raises(ValueError, match="mask"):
        native.forbid(pool, logits, np.array([0]), [short])
    with pytest.raises(ValueError, match="mask"):
        native.greedy(pool, logits, [short])


# ---- changes of single logits


@pytest.mark.parametrize("name", ["ADD", "WEAKEN", "FORBID"])
def test_only_the_named_logits_change_and_in_float64(name):
    rng = np.random.default_rng(3)
    logits = _make_logits(300, 2)
    logits[1, :4] = 0.0, -math.inf, 1e-40, 3e38
    ids = np.concatenate((np.arange(4), 4 + rng.permutation(296)[:60]))
    values = rng.uniform(0.3, 2.0, 64)
    old = logits[1, ids].astype(np.float64)
    expected = logits.copy()
    most = np.finfo(np.float32).max
    expected[1, ids] = {
        "ADD": old + values,
        "WEAKEN": np.minimum(np.where(old > 0, old / values, old * values), most),
        "FORBID": np.full(64, -np.inf),
    }[name]
    native.change(logits, 1, getattr(native.Operation, name), ids, values)
    assert np.array_equal(logits, expected)


def test_a_tiny_number_weakens_to_the_largest_float_and_not_beyond():
    logits = np.array([[5.0, -5.0]], dtype=np.float32)
    native.change(logits, 0, native.Operation.WEAKEN, np.array([0, 1]), np.array([5e-324, 5e-324]))
    assert logits.tolist() == [[np.finfo(np.float32).max, 0.0]]


@pytest.mark.parametrize("ids", [[300], [-1], [0, 10**12]])
def test_a_token_that_does_not_exist_changes_nothing(ids):
    logits = _make_logits(300)
    before = logits.copy()
    with pytest.raises(IndexError):
        native.change(logits, 0, native.Operation.ADD, np.array(ids), np.ones(len(ids)))
    with pytest.raises(IndexError):
        native.change(logits, 1, native.Operation.ADD, np.array([0]), np.ones(1))
    assert np.array_equal(logits, before)


def test_logits_of_another_type_are_refused_and_not_copied(pool):
    for wrong in (_make_logits(8).astype(np.float64), _make_logits(16)[:, ::2]):
        with pytest.raises(TypeError):
            native.forbid(pool, wrong, np.array([0]), [_make_mask(np.ones(8, dtype=bool))])


# ---- softmax


@pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52, reason="nothing here is more precise than float64")
@pytest.mark.parametrize(("temperature", "scale"), [(0.25, 10.0), (1.0, 40.0), (1000.0, 40_000.0)])
def test_weights_are_right_to_two_units_in_the_last_place(pool, temperature, scale):
    logits = _make_logits(20_000, scale=scale)
    logits[0, :5] = logits.max() - np.array([1e-30, 700.0, 707.0, 1e-3, 0.5]) * temperature
    tokens, weights, _ = native.rank(pool, logits, *_softmax_arguments(logits, temperature), 20_000)
    exact = _exact_weights(logits[0], temperature)[tokens[0]]
    normal = exact > 1e-307
    errors = np.abs(weights[0][normal] - exact[normal]) / np.spacing(exact[normal].astype(np.float64))
    rounding = 0.0 if temperature == 1.0 else -1.5 * np.log(exact[normal])  # of the quotient
    assert normal.sum() > 15_000
    assert (errors - rounding).max() <= 2.0
    assert weights[0][~normal].max(initial=0.0) <= 1e-307
    assert weights[0, 0] == 1.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_totals_are_the_sums_of_the_weights(pool, size, temperature):
    logits = _make_logits(size, 2)
    logits[1, ::3] = -math.inf
    logits[1, -1] = 0.0
    totals = native.totals(pool, logits, *_softmax_arguments(logits, temperature))
    for row, total in zip(logits, totals, strict=True):
        assert total == pytest.approx(float(_exact_weights(row, temperature).sum()), rel=1e-13)


def test_denormal_and_huge_logits_have_the_weights_of_their_differences(pool):
    logits = np.array([[1e-45, 3e-45, 0.0, -1e-45], [3e38, -3e38, 2.9e38, 3e38]], dtype=np.float32)
    assert native.totals(pool, logits, *_softmax_arguments(logits)).tolist() == [4.0, 2.0]
    assert native.totals(pool, logits, *_softmax_arguments(logits, 5e-324)).tolist() == [1.0, 2.0]


def test_a_row_with_nan_or_minus_infinity_alone_has_no_total(pool):
    logits = _make_logits(700, 3)
    logits[0, 650], logits[1] = math.nan, -math.inf
    rows, _, temperatures = _softmax_arguments(logits)
    totals = native.totals(pool, logits, rows, native.peaks(pool, logits)[0], temperatures)
    assert np.isnan(totals).tolist() == [True, True, False]


# ---- draws


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_draw_is_the_first_token_whose_running_probability_exceeds_the_number(pool, size, temperature):
    logits = np.repeat(_make_logits(size, seed=1), 60, axis=0)
    uniforms = np.random.default_rng(2).random(60)
    tokens = native.draw(pool, logits, *_softmax_arguments(logits, temperature), uniforms)
    weights = _exact_weights(logits[0], temperature)
    ends = np.cumsum(weights) / weights.sum()
    for token, uniform in zip(tokens, uniforms, strict=True):
        assert ends[token] > uniform - 1e-13
        assert token == 0 or ends[token - 1] <= uniform + 1e-13


@pytest.mark.parametrize("places", [[700], [0], [255, 256], [3, 300, 1023], [1023]])
@pytest.mark.parametrize("uniform", [0.0, math.nextafter(0, 1), 0.5, math.nextafter(1, 0)])
def test_the_ends_of_the_interval_draw_tokens_that_have_weight(pool, places, uniform):
    logits = np.full((1, 1024), -math.inf, dtype=np.float32)
    logits[0, places] = 2.0
    [token] = native.draw(pool, logits, *_softmax_arguments(logits), np.array([uniform]))
    assert token == places[int(uniform * len(places))]


# ---- ranking


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [None, 0.5, 100.0])
def test_the_ranking_is_by_logit_and_then_by_lower_token(pool, size, grid):
    logits = _make_logits(size, 2, grid=grid, seed=size)
    for width in (1, 5, 256, 4096, 10**9):
        tokens = native.best(pool, logits, np.array([1, 0]), width)
        assert tokens.shape == (2, min(width, size))
        for row, found in zip((1, 0), tokens, strict=True):
            assert np.array_equal(found, _order(logits[row])[:width])


def test_special_values_rank_as_numbers_do(pool):
    row = [-0.0, 0.0, -math.inf, 3e38, -3e38, 1e-45, -1e-45, -0.0]
    for copies in (1, 1000):  # sorted whole, and from candidates
        logits = np.full((1, 8 * copies), -math.inf, dtype=np.float32)
        logits[0, :8] = row
        assert native.best(pool, logits, np.array([0]), 7)[0].tolist() == [3, 5, 0, 1, 7, 6, 4]


@pytest.mark.parametrize("place", [0, 900, 4999])
def test_a_row_with_nan_is_ranked_somehow_without_repeating_a_token(pool, place):
    logits = _make_logits(5000)
    for row in (logits, np.full_like(logits, math.nan)):
        row[0, place] = math.nan
        for width in (5, 20, 5000):
            tokens = native.best(pool, row, np.array([0]), width)[0]
            assert len(set(tokens.tolist())) == width


def test_a_ranking_has_the_weights_and_totals_of_the_softmax(pool):
    logits = _make_logits(9000, 3)
    arguments = _softmax_arguments(logits, 0.7)
    for width in (4, 256, 9000):
        tokens, weights, totals = native.rank(pool, logits, *arguments, width)
        assert np.array_equal(tokens, native.best(pool, logits, arguments[0], width))
        assert np.array_equal(totals, native.totals(pool, logits, *arguments))
        for row in range(3):
            exact = _exact_weights(logits[row], 0.7)[tokens[row]].astype(np.float64)
            np.testing.assert_allclose(weights[row], exact, rtol=1e-14)


# ---- what must not change a bit


def _everything(pool, logits, rows):
    """What all functions answer about these rows, for each row."""
    values, tokens = native.peaks(pool, logits)
    rows = np.array(rows)
    arguments = rows, values[rows], 0.5 + 0.01 * rows
    drawn = native.draw(pool, logits, *arguments, (rows * 0.137) % 1.0)
    answers = (values[rows], tokens[rows], native.totals(pool, logits, *arguments), drawn)
    answers += native.rank(pool, logits, *arguments, 100)
    return [tuple(answer[place].tobytes() for answer in answers) for place in range(len(rows))]


def test_threads_and_other_rows_change_no_bit():
    logits = _make_logits(12_345, 37)
    one, two = native.Pool(1), native.Pool(2)
    whole = _everything(one, logits, range(37))
    assert _everything(two, logits, range(37)) == whole
    for rows in ([3], [36, 0], range(5, 25)):
        assert _everything(two, logits, rows) == [whole[row] for row in rows]
    for row in (0, 17):
        alone = logits[row : row + 1].copy()
        values, tokens = native.peaks(one, alone)
        arguments = np.zeros(1, dtype=np.int64), values, np.array([0.5 + 0.01 * row])
        answers = (values, tokens, native.totals(one, alone, *arguments))
        answers += (native.draw(one, alone, *arguments, np.array([(row * 0.137) % 1.0])),)
        answers += native.rank(one, alone, *arguments, 100)
        assert tuple(answer[0].tobytes() for answer in answers) == whole[row]
