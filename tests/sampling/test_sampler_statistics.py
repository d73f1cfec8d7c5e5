"""Frequencies of many seeded draws against the probabilities they should have."""

import numpy as np
import pytest
from arithmetics import make_rows, make_sampler
from sampling_reference import kept_probabilities, make_logits, make_state
from scipy import stats

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB, DRAWS, ROWS = 30, 10_000, 100


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_have_the_frequencies_of_the_distribution(params, along):
    logits = make_logits(0, VOCAB, scale=1.0)
    sampler = make_sampler(ROWS, VOCAB)
    counts = np.zeros(VOCAB)
    for row in range(ROWS):
        sampler.set_slot(make_state(row, seed=1000 + row, **params))
    for step in range(DRAWS // ROWS):
        if along == "seeds":
            for row in range(ROWS):
                sampler.set_slot(make_state(row, seed=step * ROWS + row, **params))
            positions = [7] * ROWS
        else:
            positions = [3 + step] * ROWS
        outputs = sampler.sample(make_rows(np.tile(logits, (ROWS, 1))), range(ROWS), positions)
        counts += np.bincount([output.token_id for output in outputs], minlength=VOCAB)
    probabilities, _ = kept_probabilities(logits, make_state(**params).params)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] / probabilities[kept].sum() * DRAWS
    assert stats.chisquare(counts[kept], expected).pvalue > 0.001
