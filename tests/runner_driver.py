"""Drives a runner by hand: page tables, chunks and batches as a test wants them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.runner import Batch, Row, RowOutput, SlotState
from tureen.contract.types import LogprobSpec
from tureen.weights.source import ModelSource, open_model

GREEDY = SamplingParams(temperature=0.0)
SPEC = LogprobSpec(prompt_start=0, top=256)


def random_tokens(count: int, seed: int, vocab_size: int = 256) -> list[int]:
    """Return `count` independent token ids. Attention over one repeated token does not depend on q and k."""
    return random.Random(seed).choices(range(vocab_size), k=count)


PROMPT = random_tokens(61, 1, 250)


def folder_source(folder: Path) -> ModelSource:
    """The model of a folder, or of a GGUF file and the mmproj file next to it."""
    if folder.is_file():
        return open_model(folder, Config(mmproj=str(next(folder.parent.glob("mmproj*"), None) or "") or None))
    return ModelSource(name=folder.name, path=folder, format="safetensors")


class Running:
    """One sequence: its tokens so far, its pages, how many tokens have K/V."""

    def __init__(
        self,
        slot: int,
        prompt: Sequence[int],
        pages: Sequence[int],
        *,
        params: SamplingParams = GREEDY,
        logprobs: LogprobSpec | None = None,
        seed: int = 0,
        banned: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.state = SlotState(slot, params, seed, tuple(prompt), (), (), logprobs, banned=banned)
        self.token_ids = list(prompt)
        self.num_prompt = len(prompt)
        self.pages = tuple(pages)
        self.num_computed = 0
        self.state_number = -1  # of the state at num_computed, for layers without attention
        self.is_new = True
        self.prompt_logprobs: list = []
        self.output_logprobs: list = []
        self.errors: list[str] = []

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def next_row(self, chunk: int, *, score: bool = False) -> Row:
        end = min(self.num_computed + chunk, len(self.token_ids))
        ids = tuple(self.token_ids[self.num_computed : end])
        targets = tuple(self.token_ids[self.num_computed + 1 : end + 1]) if score and end <= self.num_prompt else ()
        return Row(
            self.state.slot,
            ids,
            self.num_computed,
            self.pages,
            end == len(self.token_ids),
            score_targets=targets,
            state_from=self.state_number,
            state_to=2 * self.state.slot + (self.state_number == 2 * self.state.slot),
        )

    def take(self, row: Row, output: RowOutput) -> None:
        self.num_computed += len(row.token_ids)
        self.state_number = row.state_to
        self.prompt_logprobs += output.scores
        if output.error is not None:
            self.errors.append(output.error)
        elif row.sample:
            self.token_ids += output.token_ids
            self.output_logprobs += output.logprobs or (None,) * len(output.token_ids)


def step(runner, sequences: Sequence[Running], chunks: Sequence[int], *, score: bool = False) -> None:
    rows = [sequence.next_row(chunk, score=score) for sequence, chunk in zip(sequences, chunks, strict=True)]
    new = tuple(sequence.state for sequence in sequences if sequence.is_new)
    outputs = runner.run(Batch(tuple(rows), new)).rows
    for sequence, row, output in zip(sequences, rows, outputs, strict=True):
        sequence.is_new = False
        sequence.take(row, output)


def generate(runner, sequence: Running, count: int, *, chunk: int = 1 << 20, score: bool = False) -> list[int]:
    while len(sequence.output) < count and not sequence.errors:
        step(runner, [sequence], [chunk], score=score)
    return sequence.output


def computed(runner) -> Running:
    """What came of `PROMPT` in chunks, with its log-probabilities, and of tokens drawn beside another sequence."""
    first = Running(0, PROMPT, range(0, 6), logprobs=SPEC)
    other = Running(1, PROMPT[:9], range(6, 12), logprobs=SPEC)
    step(runner, [first], [23], score=True)
    while len(first.output) < 6:
        step(runner, [other, first], [5, 23], score=True)
    return first


def hidden_states(runner):
    """Those of tokens of `PROMPT`, from the third on."""
    row = Row(2, tuple(PROMPT[:7]), 0, (12,), sample=False, hidden_from=2, state_to=4)
    return runner.run(Batch((row,))).rows[0].hidden_states


def distance(report, expected) -> float:
    """How far log-probabilities are from those of an oracle."""
    return max(abs(value - expected[token]) for value, token in report.top)
