"""The operations on whole rows of logits that the sampler needs, and the shapes of their results.

The sampler never looks into logits [rows, vocabulary]: they stay where the model left them. All results are numpy
arrays on the host. A row's results are the same bits whatever rows stand beside it.
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
"""float32 [rows, vocabulary]: a tensor or an array, depending on the arithmetic."""

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
Change = tuple[Ids, Values]
"""Token ids [k] of a row, and a number for each of them."""

NOT_SOUND, NOTHING_ALLOWED = -1, -2
"""Stand in place of a token id in a row that has none to draw."""


class Operation(Enum):
    """How a logit and the number that comes with it are combined: in float64, then rounded to float32."""

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


Sums = Any
"""Running sums of the weights of some rows, in a form of the arithmetic's own."""


class NotedDraw(NamedTuple):
    """Tokens drawn from r rows, and in what."""

    token_ids: Ids  # [r]
    totals: Values  # [r]: of the weights of the whole vocabulary
    sums: Sums


class Spans(NamedTuple):
    """Shares of some tokens in the draws of r rows, in weights: a token is drawn from `starts` on, up to `weights`
    more."""

    starts: Values  # [r, k]: sum of the weights of the tokens with lower ids
    weights: Values  # [r, k]


Saved = tuple[Ids | None, Any]
"""Tokens of a row, None = all, and the logits that they had before a stage, in a form of the arithmetic's own."""


class TracedRow(NamedTuple):
    """The way of a row of logits through its stages."""

    candidates: Sequence[int]  # the best tokens of the last state, the token itself, then the best of the others
    states: Sequence[tuple[tuple[float | None, ...], tuple[float, ...]]]
    """The candidates' logits, None = -inf, and their probabilities at temperature 1: before all stages, and after each
    of them."""


class Arithmetic(Protocol):
    """The sampler's operations on one kind of logits. Rows are named by their index."""

    def prepare(self, logits: Logits) -> Logits:
        """Returns the logits as float32 that may be overwritten: the same object where they are."""

    def copy(self, logits: Logits, rows: Sequence[int]) -> Logits:
        """Returns a copy of these rows, [len(rows), vocabulary]."""

    def greedy(self, logits: Logits, masks: Sequence[Mask | None]) -> list[int]:
        """Returns for each row the lowest id that has the largest logit among those that its mask allows.

        NOT_SOUND in a row with NaN or +inf, or -inf alone, NOTHING_ALLOWED where only the mask leaves nothing else.
        `masks` has one for each row, or none at all.
        """

    def peaks(self, logits: Logits) -> Peaks: ...

    def change(self, logits: Logits, operation: Operation, rows: Sequence[int], changes: Sequence[Change]) -> None:
        """Applies the operation to the logits in place; there is one change for each of `rows`.

        Where a change names an id twice, both numbers must be the same.
        """

    def forbid(self, logits: Logits, peaks: Peaks, rows: Sequence[int], masks: Sequence[Mask]) -> None:
        """Sets logits to -inf wherever the mask has no bit, in rows that are sound, and corrects their peaks.

        The peak of a row in which nothing is left is -inf.
        """

    def draw(self, softmaxes: Softmaxes, uniforms: Values) -> Ids:
        """Draws a token for each of the r rows by inverse CDF: in the order of ids, the first whose running probability
        exceeds its uniform. uniforms and result are [r]."""

    def draw_noting(self, softmaxes: Softmaxes, uniforms: Values) -> NotedDraw:
        """Draws the same tokens as `draw`, and returns what it takes to say where."""

    def spans(self, softmaxes: Softmaxes, sums: Sums, token_ids: Ids) -> Spans:
        """Returns where `draw_noting`, which gave the sums, draws the tokens token_ids [r, k]."""

    def saved(self, logits: Logits, rows: Sequence[int], token_ids: Sequence[Ids | None]) -> list[Saved]:
        """Returns the logits of some tokens of each of the rows, or of all tokens, as they are now."""

    def trace(
        self,
        logits: Logits,
        rows: Ids,
        histories: Sequence[Sequence[Saved]],
        token_ids: Ids,
        totals: Values,
        width: int,
    ) -> list[TracedRow]:
        """Returns the ways of r rows through their stages, of which `histories` has what each saved before it.

        token_ids [r] are those to be shown beside the `width` best of each state. totals [r]: sums of the weights at
        temperature 1 of rows without a stage, where they are known, else NaN.
        """

    def rank(self, softmaxes: Softmaxes, width: int) -> Ranking:
        """Returns the `width` most probable tokens of each row, or as many as there are."""

    def best(self, logits: Logits, rows: Ids, width: int) -> Ids:
        """Returns the ids of the ranking, without a softmax: [len(rows), width], or fewer columns where the vocabulary
        is smaller."""

    def log_softmax(self, softmaxes: Softmaxes, token_ids: Ids) -> Values:
        """Returns the log-probabilities at token_ids [r, k], in nats: [r, k]. A row with NaN or +inf, or with -inf
        alone, is NaN."""

    def host_row(self, logits: Logits, row: int) -> NDArray[np.float32]:
        """Returns a row on the host, [vocabulary]. It may share the logits' memory."""

    def tensor(self, logits: Logits, rows: Sequence[int]) -> torch.Tensor:
        """Returns a copy [len(rows), vocabulary] as a torch tensor, on the device of the logits."""

    def adopt(self, rows: NDArray[np.float32] | torch.Tensor) -> Logits:
        """Converts rows [rows, vocabulary] that others computed to logits of this arithmetic."""

    def replace(self, logits: Logits, row: int, other: Logits, other_row: int) -> None:
        """Sets logits[row] to other[other_row]."""
