"""With torch's kernels a prompt has the same log-probabilities however it is computed."""

from runner_driver import Running, folder_source, random_tokens, step
from tiny_models import write

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.runner.load import load_runner

MODELS = ("llama", "qwen2-moe", "gemma2-softcaps", "gemma3")
DTYPES = ("float32", "bfloat16", "float16")
THREADS = (1, 2, 3)


def check_invariance(folder, model, dtype, threads, *, length, num_tokens):
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
        while len(sequence.output) < num_tokens:
            step(runner, [*mates[:3], sequence, *mates[3:]], [3] * len(mates[:3]) + [chunk] + [50] * len(mates[3:]))
        return sequence.output, sequence.output_logprobs

    alone = run(0, 1000, 0)
    assert run(10, 1, 0) == alone
    assert run(0, 13, 5) == alone
    assert run(0, 1000, 30) == alone
