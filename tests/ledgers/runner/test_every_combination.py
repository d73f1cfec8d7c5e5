"""Batch invariance and ranks in every combination of settings; tests/runner has each pair of them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "runner"))
import test_ranks
from test_batch_invariance import alone, check_company, forward  # noqa: F401 - fixtures
from test_torch_batch_invariance import DTYPES, MODELS, THREADS, check_invariance, same_threads  # noqa: F401 - a fixture
from tiny_models import write

GUARDS = ("attention", "kernels", "layers", "models", "runner")


@pytest.mark.usefixtures("same_threads")
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_logprobs_of_torch_do_not_depend_on_company_chunks_or_pages(tmp_path, model, dtype, threads):
    check_invariance(tmp_path, model, dtype, threads, length=75)


@pytest.mark.parametrize("mates", range(1, 64))
def test_logits_do_not_depend_on_any_number_of_rows(forward, alone, mates):  # noqa: F811
    check_company(forward, alone, mates)


@pytest.fixture
def one_torch_thread():
    before = test_ranks.torch.get_num_threads()
    test_ranks.torch.set_num_threads(1)
    yield
    test_ranks.torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("variant", test_ranks.MODELS)
def test_logits_are_equal_to_the_last_bit_with_one_two_and_four_ranks(tmp_path, variant):
    oracle = write(tmp_path, variant, **test_ranks.MODELS[variant])
    test_ranks.check_ranks(tmp_path, oracle, (1, 2, 4))
