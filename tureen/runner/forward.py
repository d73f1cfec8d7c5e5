"""The contract between a runner and a model on a device. The model is asked once a step, for all that is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tureen.contract.runner import Batch
from tureen.lora.adapter import Adapter
from tureen.runner.trace import Trace, TraceOptions
from tureen.sampling.arithmetic import Logits, Peaks

SCORE_LOGITS = 1 << 22  # most logits computed at once for prompt log-probabilities


class ForwardOutput(NamedTuple):
    """The result of a step. It holds until the next step is run.

    A row that samples draws the token that follows its last, and those that follow each token before a guess. Draws
    stand in the order of the rows.
    """

    best: Sequence[int] = ()  # of each draw the token that `Arithmetic.greedy` gives it without a mask ...
    logits: Logits | None = None  # ... or, where not only the best tokens were asked for, [draws, vocab], and ...
    peaks: Peaks | None = None  # ... what `Arithmetic.peaks` says of them
    scored: Iterator[Logits] = iter(())
    """The logits that score targets, row after row, in pieces [tokens, vocab] as `score_pieces` cuts them. A piece
    holds until the next one is taken."""
    hidden: tuple[NDArray[np.float32], ...] = ()
    """The hidden states [tokens, hidden_size] of each row that asks, after the final norm."""


class Forward(Protocol):
    """A model on a device. Tokens of a step stand one after another, in the order of its rows."""

    dtype: str
    activations: str  # inputs of matrices in block formats; "" = there are no such matrices
    device_name: str

    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        """Computes and stores K/V of all rows, and computes what the rows ask for.

        best_only: of the rows that sample only the best tokens are wanted, not the logits.
        """

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Makes an adapter usable: rows may name it by this number from now on. Raises InvalidRequest when it cannot be
        used here."""

    def unload_adapter(self, number: int) -> None: ...

    def count_experts(self, *, is_on: bool) -> None:
        """Counts how many tokens each expert takes from now on, or no longer. Raises InvalidRequest where that is not
        known here."""

    def take_expert_counts(self) -> list[list[int]]:
        """Returns the counts of each layer that has experts, in their order, since they were last taken."""

    def start_trace(self, options: TraceOptions) -> Trace:
        """Records the steps from now on. Raises InvalidRequest for what cannot be recorded here."""


def drawn_tokens(batch: Batch) -> list[int]:
    """Returns the indices of the step's tokens after which a token is drawn."""
    indices: list[int] = []
    first = 0
    for row in batch.rows:
        if row.sample:
            indices += range(first + row.num_known - 1, first + len(row.token_ids))
        first += len(row.token_ids)
    return indices


def score_pieces(batch: Batch, vocab_size: int) -> list[range]:
    """Returns the indices of the step's tokens whose logits score targets, in pieces of at most SCORE_LOGITS logits.

    No piece has tokens of two rows.
    """
    size = max(1, SCORE_LOGITS // vocab_size)
    pieces, first = [], 0
    for row in batch.rows:
        begin = first + row.score_from
        end = begin + len(row.score_targets)
        pieces += [range(at, min(at + size, end)) for at in range(begin, end, size)]
        first += len(row.token_ids)
    return pieces


def hidden_ranges(batch: Batch) -> list[range]:
    """Returns, for each row that asks for hidden states, the indices of those of the step's tokens."""
    ranges, first = [], 0
    for row in batch.rows:
        end = first + len(row.token_ids)
        if row.hidden_from is not None:
            ranges.append(range(first + row.hidden_from, end))
        first = end
    return ranges


def as_wide(embeddings: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Joins embeddings [tokens, width], with zeros at the ends of those that are not as wide as the widest."""
    width = max(rows.shape[1] for rows in embeddings)
    return np.concatenate([np.pad(rows, ((0, 0), (0, width - rows.shape[1]))) for rows in embeddings])
