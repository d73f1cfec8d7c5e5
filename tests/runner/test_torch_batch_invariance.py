"""With torch's kernels too: the same to the last bit whatever else is computed, and however it is cut into steps.

Each pair of a model, a type and a number of threads is here; tests/ledgers/runner has every combination.
"""

import pytest
from torch_invariance import DTYPES, MODELS, THREADS, check_invariance

PAIRS = [
    (model, dtype, THREADS[(number + place) % 3])
    for number, model in enumerate(MODELS)
    for place, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("model", "dtype", "threads"), PAIRS)
def test_logprobs_do_not_depend_on_batch_mates_chunks_or_pages(tmp_path, model, dtype, threads):
    check_invariance(tmp_path, model, dtype, threads, length=23, num_tokens=2)
