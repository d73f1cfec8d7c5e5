"""A model's tokens are those of steps without guesses, bit for bit, whatever is guessed."""

from __future__ import annotations

import random
import typing

import numpy as np
import pytest
from runner_driver import GREEDY, Running, folder_source, random_tokens
from samples import either
from tiny_models import write

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.runner import Batch, Row
from tureen.contract.types import LogprobSpec
from tureen.grammar.base import Ending
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner

PROMPT = random_tokens(21, 5)
pytestmark = pytest.mark.sampled

COUNT = either(24, 14)  # tokens of output
CASES = {
    "greedy": {"params": GREEDY},
    "drawn": {"params": SamplingParams(temperature=1.0, top_p=0.95), "seed": 3},
    "penalties": {"params": SamplingParams(temperature=0.7, frequency_penalty=1.5, repetition_penalty=1.2), "seed": 4},
    "penalties of a window": {"params": SamplingParams(repetition_penalty=1.4, repeat_last_n=3), "seed": 4},
    "log-probabilities": {"params": SamplingParams(temperature=1.0), "seed": 5, "logprobs": LogprobSpec(top=3)},
    "bad words": {
        "params": SamplingParams(temperature=0.3, bad_words=("many",)),
        "seed": 7,
        "banned": tuple((first, second) for first in range(256) for second in range(first % 3, 256, 3)),
    },
    "ends later": {"params": SamplingParams(temperature=1.0, min_new_tokens=9), "seed": 6},
}


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request, tmp_path_factory):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native kernels")
    folder = tmp_path_factory.mktemp("llama")
    write(folder, "llama")
    return load_runner(folder_source(folder), Config(kernels=request.param, max_total_tokens=4096, num_threads=2))


class Guessing(Running):
    """A sequence whose steps carry guesses."""

    coming = ()  # what will be drawn, from the first output token on; none: no guesses
    right = 1.0  # probability that a token of it is guessed right

    def guessing_row(self, rng):
        row = self.next_row(1000)
        first = len(self.output)
        guesses = tuple(
            token if rng.random() < self.right else rng.randrange(256)
            for token in self.coming[first : first + rng.randrange(6)]
        )
        return Row(row.slot, (*row.token_ids, *guesses), row.start, row.pages, True, num_drafts=len(guesses))

    def take(self, row, output):
        super().take(row, output)
        self.num_computed += len(output.token_ids) - 1 - row.num_drafts


def run(runner, sequences, rng, count=COUNT):
    """The number of steps until the first has so many tokens."""
    num_steps = 0
    while len(sequences[0].output) < count:
        rows = tuple(sequence.guessing_row(rng) for sequence in sequences)
        new = tuple(sequence.state for sequence in sequences if sequence.is_new)
        for sequence, row, output in zip(sequences, rows, runner.run(Batch(rows, new)).rows, strict=True):
            assert output.error is None
            sequence.is_new = False
            sequence.take(row, output)
        num_steps += 1
    return num_steps


def make(case, slot=0):
    return Guessing(slot, PROMPT[slot:], range(8 * slot, 8 * slot + 8), **CASES[case])


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probabilities_are_those_without_guesses(runner, case, right):
    plain = make(case)
    assert run(runner, [plain], random.Random(0)) == COUNT
    guessing = make(case)
    guessing.coming, guessing.right = plain.output, right
    num_steps = run(runner, [guessing], random.Random(right))
    assert guessing.output[:COUNT] == plain.output
    assert guessing.output_logprobs[:COUNT] == plain.output_logprobs
    assert (num_steps < COUNT) is (right > 0)


def test_guesses_of_one_row_change_nothing_of_its_neighbours(runner):
    cases = [*CASES, *CASES]
    alone = []
    for slot, case in enumerate(cases):
        alone.append(make(case, slot))
        run(runner, alone[-1:], random.Random(0))
    together = [make(case, slot) for slot, case in enumerate(cases)]
    for sequence, plain in zip(together[::2], alone[::2], strict=True):
        sequence.coming, sequence.right = plain.output, 0.7
    run(runner, together, random.Random(1), count=12)
    for sequence, plain in zip(together, alone, strict=True):
        length = min(len(sequence.output), COUNT)
        assert length >= 3
        assert sequence.output[:length] == plain.output[:length]


def test_a_mask_for_each_place_says_what_may_be_drawn_there(runner):
    plain = make("greedy")
    run(runner, [plain], random.Random(0))
    masks = np.zeros((3, 8), dtype=np.uint32)
    allowed = plain.output[0], plain.output[1], (plain.output[2] + 1) % 256
    for mask, token in zip(masks, allowed, strict=True):
        mask[token // 32] |= 1 << token % 32

    class Masks:
        endings: typing.ClassVar = {}

        def wait(self):
            return {0: tuple(masks)}

    sequence = make("greedy")
    row = Row(0, (*PROMPT, *plain.output[:2]), 0, sequence.pages, True, num_drafts=2)
    [output] = runner.run(Batch((row,), (sequence.state,)), Masks()).rows
    assert output.token_ids == allowed


def mask_of(*token_ids):
    mask = np.zeros(8, dtype=np.uint32)
    for token in token_ids:
        mask[token // 32] |= 1 << token % 32
    return mask


@pytest.mark.parametrize("place", [0, 1])
def test_near_the_end_a_word_is_ended_where_the_model_itself_would_begin_another(runner, place):
    plain = make("greedy")
    run(runner, [plain], random.Random(0))
    best = plain.output[place]
    goes_on, end = sorted({1, 2, 3} - {best})[:2]
    everything = mask_of(*range(256))

    class Masks:
        def __init__(self, mask, ending):
            self.masks = {0: (everything, mask)[1 - place :]}
            self.endings = {0: (None, ending)[1 - place :]}

        def wait(self):
            return self.masks

    def drawn(mask, ending):
        sequence = make("greedy")
        guesses = plain.output[:place]
        row = Row(0, (*PROMPT, *guesses), 0, sequence.pages, True, num_drafts=len(guesses))
        [output] = runner.run(Batch((row,), (sequence.state,)), Masks(mask, ending)).rows
        return output.token_ids[-1]

    ending = Ending(open=everything, nearer=mask_of(end))
    assert drawn(mask_of(goes_on, end), ending) == end
    assert drawn(mask_of(best, end), ending) == best
    assert drawn(mask_of(goes_on), None) == goes_on
