"""Perplexity against numpy, on a model that is a table: each token's probability depends on the one before it."""

from itertools import pairwise

import numpy as np
import pytest

from tureen.bench.perplexity import perplexity, token_logprobs

VOCAB = 7


class TableEngine:
    """Answers as `tureen.Engine` does; `calls` keeps what was asked."""

    def __init__(self):
        self.table = np.log(np.random.default_rng(0).dirichlet(np.ones(VOCAB), size=VOCAB))
        self.prompts = []

    def generate(self, *, input_ids, sampling_params, return_logprob, logprob_start_len):
        assert return_logprob
        assert logprob_start_len == 0
        self.prompts = input_ids
        return [{"meta_info": {"input_token_logprobs": self._entries(ids)}} for ids in input_ids]

    def _entries(self, ids):
        return [[None, ids[0], None], *([float(self.table[one, other]), other, None] for one, other in pairwise(ids))]


@pytest.mark.parametrize("count", [2, 4, 5, 9, 10, 12])
def test_every_token_but_a_chunks_first_is_judged_by_those_before_it(count):
    engine = TableEngine()
    ids = np.random.default_rng(count).integers(0, VOCAB, count).tolist()
    expected = [engine.table[ids[i - 1], ids[i]] for i in range(count) if i % 4]
    assert token_logprobs(engine, ids, chunk=4) == pytest.approx(expected)
    assert all(1 < len(prompt) <= 4 for prompt in engine.prompts)


def test_a_model_that_knows_nothing_hesitates_between_all_tokens():
    assert perplexity([np.log(1 / 50)] * 10) == pytest.approx(50)
    assert perplexity(np.log([1 / 2, 1 / 8])) == pytest.approx(4)
