"""The best token that a native forward pass finds for each row, against numpy's on the logits that it returns."""

from __future__ import annotations

import numpy as np
import pytest

from tureen.contract.runner import Row

native = pytest.importorskip("tureen.kernels.cpu._native")

HIDDEN = 32
NOTHING = np.empty(0, np.float32)


def _run(matrix, tokens, *, threads, sample=None):
    """A model without layers: token i's embedding times the matrix."""
    pool = native.Pool(threads)
    tape = native.Tape(pool, native.KvCache([(1, 16, -1, False)], 1, 256, "float32"), None, HIDDEN, len(matrix))

    def packed(values):
        return native.Matrix.pack(pool, values.view(np.uint8).reshape(-1), "F32", "F32", *values.shape)

    embeddings = np.random.default_rng(1).uniform(0.5, 1.5, matrix.shape).astype(np.float32)
    tape.embed(packed(embeddings), 1.0)
    no_norm = native.Norm(NOTHING, 0.0, NOTHING, False)
    tape.head(norm=no_norm, matrix=packed(matrix), bias=NOTHING, scale=1.0, softcap=0.0)
    sample = sample or [True] * len(tokens)
    tape.run(tuple(Row(0, (token,), 0, (0,), draws) for token, draws in zip(tokens, sample, strict=True)))
    return tape.best(), *tape.sampled()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 9, 70])
@pytest.mark.parametrize("vocab", [1, 17, 4099])
def test_the_best_is_the_lowest_token_among_those_with_the_largest_logit(vocab, rows, threads):
    matrix = np.random.default_rng(vocab).integers(-2, 3, (vocab, 1)).repeat(HIDDEN, axis=1).astype(np.float32)
    best, logits, values, token_ids = _run(matrix, [i % vocab for i in range(rows)], threads=threads)
    assert logits.shape == (rows, vocab)
    assert best == token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert values.tolist() == logits.max(axis=1).tolist()


def test_rows_that_do_not_sample_have_no_best_token():
    matrix = np.random.default_rng(3).normal(size=(300, HIDDEN)).astype(np.float32)
    alone = [_run(matrix, [token], threads=2)[0][0] for token in (5, 7)]
    assert _run(matrix, [5, 6, 7, 8], threads=2, sample=[True, False, True, False])[0] == alone
    assert _run(matrix, [5], threads=2, sample=[False])[0] == []


@pytest.mark.parametrize("vocab", [40, 4099])
@pytest.mark.parametrize("good", [0, -1])
def test_tokens_that_cannot_be_are_passed_over_wherever_they_stand(vocab, good):
    matrix = np.full((vocab, HIDDEN), -np.inf, np.float32)
    matrix[good] = -1.0
    best, logits, values, _ = _run(matrix, [0, 1], threads=2)
    assert best == [good % vocab] * 2
    assert values.tolist() == logits[:, good].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 2000, -1])
def test_a_row_with_one_wrong_number_has_no_best_token(bad, place):
    matrix = np.random.default_rng(4).normal(size=(4099, HIDDEN)).astype(np.float32)
    matrix[place] = bad
    best, _, values, token_ids = _run(matrix, [1, 2, 3], threads=2)
    assert best == token_ids.tolist() == [-1] * 3
    assert np.isnan(values).all()


def test_a_row_of_minus_infinity_alone_has_no_best_token():
    best, _, values, _ = _run(np.full((99, HIDDEN), -np.inf, np.float32), [1], threads=2)
    assert best == [-1]
    assert np.isnan(values).all()
