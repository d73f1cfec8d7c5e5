"""With torch's kernels too: the same to the last bit whatever else is computed, and however it is cut into steps.

Each pair of a model, a type and a number of threads is here; tests/ledgers/runner has every combination.
"""

import pytest
import torch
from runner_driver import Running, folder_source, random_tokens, step
from tiny_models import write

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.runner.load import load_runner

MODELS = ("llama", "qwen2-moe", "gemma2-softcaps", "gemma3")


DTYPES = ("float32", "bfloat16", "float16")
THREADS = (1, 2, 3)
PAIRS = [
    (model, dtype, THREADS[(number + place) % 3])
    for number, model in enumerate(MODELS)
    for place, dtype in enumerate(DTYPES)
]


@pytest.fixture
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
@pytest.mark.parametrize(("model", "dtype", "threads"), PAIRS)
def test_logprobs_do_not_depend_on_batch_mates_chunks_or_pages(tmp_path, model, dtype, threads):
    check_invariance(tmp_path, model, dtype, threads, length=39)


def check_invariance(folder, model, dtype, threads, length):
    """A prompt has the same log-probabilities alone, in chunks and in a batch."""
    write(folder, model)
    settings = {"kernels": "torch", "device": "cpu", "max_total_tokens": 4096}
    runner = load_runner(folder_source(folder), Config(dtype=dtype, num_threads=threads, **settings))
    prompt = random_tokens(length, 5)

    def run(first_page, chunk, others):
        sequence = Running(0, prompt, range(first_page, first_page + 10), logprobs=LogprobSpec(prompt_start=0, top=256))
        mates = []
        for index in range(others):
            others_prompt = random_tokens(1 + 7 * index % 40, index)
            mates.append(Running(1 + index, others_prompt, range(20 + 6 * index, 26 + 6 * index)))
        while len(sequence.output) < 3:
            step(runner, [*mates[:3], sequence, *mates[3:]], [3] * len(mates[:3]) + [chunk] + [50] * len(mates[3:]))
        return sequence.output, sequence.output_logprobs

    alone = run(0, 1000, 0)
    assert run(10, 1, 0) == alone
    assert run(0, 13, 5) == alone
    assert run(0, 1000, 30) == alone
