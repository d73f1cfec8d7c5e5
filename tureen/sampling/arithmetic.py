"""The operations on whole rows of logits that the sampler needs, and the shapes of their results.

The sampler never looks into logits [rows, vocabulary]: they stay where the model left them. All answers are numpy
arrays on the host, and are the same bits for a row whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tureen.grammar import Mask

if TYPE_CHECKING:
    import torch

Logits = Any
"""[rows, vocabulary] float32: a tensor or an array, as the arithmetic has it."""

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
Change = tuple[Ids, Values]
"""Token ids [k] of a row, and a number for each."""

NOT_SOUND, NOTHING_ALLOWED = -1, -2
"""In place of a token id."""


class Operation(Enum):
    """How a logit and the number that comes with it are combined: in float64, then rounded."""

    ADD = auto()
    WEAKEN = auto()  # what is positive is divided by the number, the rest multiplied; at most the largest float32
    FORBID = auto()  # -inf, whatever the number


class Peaks(NamedTuple):
    """The largest logit of each row, and the lowest id that has it. It is not finite in a row that is not sound."""

    values: NDArray[np.float32]  # [rows]
    token_ids: Ids  # [rows]


class Softmaxes(NamedTuple):
    """The softmaxes of some rows of the logits, each of (logit - peak) / temperature."""

    logits: Logits
    rows: Ids  # [r], ascending
    peaks: NDArray[np.float32]  # [r]: the largest logit of each
    temperatures: Values  # [r]

    def of(self, places: Sequence[int]) -> Softmaxes:
        """Returns the softmaxes at some places among `rows`."""
        index = np.array(places, dtype=np.int64)
        return Softmaxes(self.logits, self.rows[index], self.peaks[index], self.temperatures[index])


class Ranking(NamedTuple):
    """The most probable tokens of r rows, best first, the lower id first among equals."""

    token_ids: Ids  # [r, w]
    weights: Values  # [r, w]: relative to the best token's, which is 1
    totals: Values  # [r]: sums of the weights over the whole vocabulary


class Arithmetic(Protocol):
    """On one kind of logits. Rows are named by their index."""

    def prepare(self, logits: Logits) -> Logits:
        """Returns the logits as float32 that may be overwritten: the same object where they are."""

    def copy(self, logits: Logits, rows: Sequence[int]) -> Logits:
        """[len(rows), vocabulary]"""

    def greedy(self, logits: Logits, masks: Sequence[Mask | None]) -> list[int]:
        """Returns for each row the lowest id that has the largest logit among those that its mask allows.

        NOT_SOUND in a row with NaN or +inf, or -inf alone, NOTHING_ALLOWED where only the mask leaves nothing else.
        `masks` has one for each row, or none at all.
        """

    def peaks(self, logits: Logits) -> Peaks: ...

    def change(self, logits: Logits, operation: Operation, rows: Sequence[int], changes: Sequence[Change]) -> None:
        """One change for each of `rows`. Where one names an id twice, both times must give the same."""

    def forbid(self, logits: Logits, peaks: Peaks, rows: Sequence[int], masks: Sequence[Mask]) -> None:
        """-inf wherever the mask has no bit, in rows that are sound. Their peaks are kept right; -inf is one then."""

    def draw(self, softmaxes: Softmaxes, uniforms: Values) -> Ids:
        """[r]: in the order of ids, the first whose running probability exceeds uniform [r]."""

    def rank(self, softmaxes: Softmaxes, width: int) -> Ranking:
        """The `width` best, or as many as there are."""

    def best(self, logits: Logits, rows: Ids, width: int) -> Ids:
        """[len(rows), width]: the ids of the ranking, without a softmax; fewer where the vocabulary has no more."""

    def log_softmax(self, softmaxes: Softmaxes, token_ids: Ids) -> Values:
        """[r, k] at token_ids [r, k]. NaN all over a row that has NaN or +inf, or -inf alone."""

    def host_row(self, logits: Logits, row: int) -> NDArray[np.float32]:
        """[vocabulary]. It may share the logits' memory."""

    def tensor(self, logits: Logits, rows: Sequence[int]) -> torch.Tensor:
        """A copy [len(rows), vocabulary] where the logits are, for what wants torch."""

    def adopt(self, rows: NDArray[np.float32] | torch.Tensor) -> Logits:
        """Returns rows [rows, vocabulary] that others computed as logits of this arithmetic."""

    def replace(self, logits: Logits, row: int, other: Logits, other_row: int) -> None:
        """logits[row] = other[other_row]"""
