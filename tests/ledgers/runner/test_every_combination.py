"""Batch invariance of torch's kernels in every combination of settings; tests/runner has each pair of them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "runner"))
from torch_invariance import DTYPES, MODELS, THREADS, check_invariance

GUARDS = ("attention", "kernels", "layers", "models", "runner")


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_logprobs_of_torch_do_not_depend_on_company_chunks_or_pages(tmp_path, model, dtype, threads):
    check_invariance(tmp_path, model, dtype, threads, length=75, num_tokens=3)
