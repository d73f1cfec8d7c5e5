"""Explains drawn tokens: the best candidates after each stage, as the pipeline itself computes them.

A row that is not explained costs nothing here, and one that is draws the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.contract.params import SamplingParams
from tureen.contract.types import Explanation, StageView
from tureen.sampling import processors
from tureen.sampling.arithmetic import (
    Arithmetic,
    Ids,
    Logits,
    NotedDraw,
    Peaks,
    Ranking,
    Saved,
    Softmaxes,
    TracedRow,
    Values,
)
from tureen.sampling.filtered import CutDraw, WatchCut, find
from tureen.sampling.slots import Slot

CANDIDATES = 8
"""Best tokens shown after each stage that changes logits. A token that is shown is shown at every stage."""

MODEL, PROCESSOR, GRAMMAR, TEMPERATURE, TYPICAL, DRAW = (
    "model", "custom_logit_processor", "grammar", "temperature", "typical_p", "draw",
)  # fmt: skip
"""Names of the stages that are not functions of processors.py under their parameter's name."""


class CutDraws(NamedTuple):
    """Rows that were drawn from what cuts had left, and the cuts as they acted."""

    rows: Sequence[int]
    ranking: Ranking
    kept: Sequence[Sequence[tuple[str, int, float]]]
    """For each row, of each cut: its parameter, how many tokens are left, their weights' sum."""

    draw: CutDraw


class PlainDraw(NamedTuple):
    """Rows that were drawn from their whole softmax."""

    softmaxes: Softmaxes
    noted: NotedDraw


class Tracer:
    """Notes what the stages do to those rows of one step that are explained, and explains what was drawn."""

    def __init__(self, arithmetic: Arithmetic, logits: Logits, rows: Sequence[int]) -> None:
        self._arithmetic = arithmetic
        self._logits = logits
        self._names: dict[int, list[str]] = {row: [MODEL] for row in rows}  # of the stages of each row
        self._saved: dict[int, list[Saved]] = {row: [] for row in rows}  # what they changed
        self._uniforms: dict[int, float] = {}  # random numbers of the rows that are drawn
        self._plain: PlainDraw | None = None
        self._cuts: list[CutDraws] = []

    def before(self, stage: str, changes: Mapping[int, Ids | None]) -> None:
        """Keeps the logits that a stage is going to change, by row."""
        changing = [row for row in changes if row in self._names]
        kept = self._arithmetic.saved(self._logits, changing, [changes[row] for row in changing])
        for row, saved in zip(changing, kept, strict=True):
            self._names[row].append(stage)
            self._saved[row].append(saved)

    def draw(self, softmaxes: Softmaxes, uniforms: Values) -> Ids:
        """Draws the tokens of rows without cuts, as `Arithmetic.draw` does."""
        noted = self._arithmetic.draw_noting(softmaxes, uniforms)
        self._note_uniforms(softmaxes.rows.tolist(), uniforms)
        self._plain = PlainDraw(softmaxes, noted)
        return noted.token_ids

    def watch(self, rows: Sequence[int], uniforms: Values, params: Sequence[SamplingParams]) -> WatchCut:
        """Takes the random numbers [r] and the parameters of rows with cuts. Returns what hears of their draws."""
        self._note_uniforms(rows, uniforms)

        def note(places: Sequence[int], ranking: Ranking, draw: CutDraw) -> None:
            indices = [index for index, place in enumerate(places) if rows[place] in self._names]
            if indices:
                own = Ranking(ranking.token_ids[indices], ranking.weights[indices], ranking.totals[indices])
                kept = _kept(own, [params[places[index]] for index in indices])
                of_draw = CutDraw(draw.token_ids[indices], draw.weights[indices], draw.ends[indices])
                self._cuts.append(CutDraws([rows[places[index]] for index in indices], own, kept, of_draw))

        return note

    def explain(
        self, peaks: Peaks, batch: Sequence[Slot], positions: Sequence[int], tokens: Mapping[int, int]
    ) -> dict[int, Explanation]:
        """Returns the explanations of the rows that were noted and have a token. `peaks`: of the logits as they were
        drawn from."""
        rows = [row for row in self._names if row in tokens]
        if not rows:
            return {}
        totals = self._totals(batch)
        traced = self._arithmetic.trace(
            self._logits,
            np.array(rows, dtype=np.int64),
            [self._saved[row] for row in rows],
            np.array([tokens[row] for row in rows], dtype=np.int64),
            np.array([totals.get(row, np.nan) for row in rows]),
            min(CANDIDATES, self._logits.shape[1]),
        )
        ways = dict(zip(rows, traced, strict=True))
        stages = {row: self._changes(row, way, batch[row].params) for row, way in ways.items()}
        self._add_plain_draws(batch, ways, stages)
        for cuts in self._cuts:
            _add_cut_draws(cuts, peaks, batch, ways, stages)
        return {
            row: Explanation(
                token_id=tokens[row],
                position=positions[row],
                chosen_by="draw" if row in self._uniforms else "best",
                random=self._uniforms.get(row),
                candidates=tuple(ways[row].candidates),
                stages=tuple(of_row),
            )
            for row, of_row in stages.items()
        }

    def _note_uniforms(self, rows: Sequence[int], uniforms: Values) -> None:
        self._uniforms.update(zip(rows, uniforms.tolist(), strict=True))

    def _totals(self, batch: Sequence[Slot]) -> dict[int, float]:
        """Returns sums of weights that drawing has shown already: of rows that were drawn at temperature 1."""
        totals: dict[int, float] = {}
        for cuts in self._cuts:
            totals |= zip(cuts.rows, cuts.ranking.totals.tolist(), strict=True)
        if self._plain is not None:
            totals |= zip(self._plain.softmaxes.rows.tolist(), self._plain.noted.totals.tolist(), strict=True)
        return {row: total for row, total in totals.items() if batch[row].params.temperature == 1.0}

    def _changes(self, row: int, way: TracedRow, params: SamplingParams) -> list[StageView]:
        """Returns the stages that change logits, the model before them."""
        return [
            StageView(name, probabilities, _value(params, name), logits)
            for name, (logits, probabilities) in zip(self._names[row], way.states, strict=True)
        ]

    def _add_plain_draws(
        self, batch: Sequence[Slot], ways: Mapping[int, TracedRow], stages: Mapping[int, list[StageView]]
    ) -> None:
        """Adds what follows the logits of rows without cuts."""
        if self._plain is None:
            return
        softmaxes, noted = self._plain
        rows = softmaxes.rows.tolist()
        ids = _padded([ways[row].candidates if row in ways else (0,) for row in rows])
        spans, totals = self._arithmetic.spans(softmaxes, noted.sums, ids), noted.totals[:, None]
        shares = spans.weights / totals, spans.starts / totals, (spans.starts + spans.weights) / totals
        for row, *of_row in zip(rows, *(values.tolist() for values in shares), strict=True):
            if row in ways:
                own, starts, ends = (values[: len(ways[row].candidates)] for values in of_row)
                if batch[row].params.temperature != 1.0:
                    stages[row].append(StageView(TEMPERATURE, tuple(own), batch[row].params.temperature))
                stages[row].append(_draw_view(own, starts, ends))


def _add_cut_draws(
    cuts: CutDraws,
    peaks: Peaks,
    batch: Sequence[Slot],
    ways: Mapping[int, TracedRow],
    stages: Mapping[int, list[StageView]],
) -> None:
    """Adds what follows the logits of rows with cuts."""
    params, totals = [batch[row].params for row in cuts.rows], cuts.ranking.totals[:, None]
    ids = _padded([ways[row].candidates for row in cuts.rows])
    logits = _padded([[-np.inf if x is None else x for x in stages[row][-1].logits] for row in cuts.rows])
    weights = np.exp((logits - peaks.values[cuts.rows, None]) / processors.temperature(params)[:, None])
    starts, left = cuts.draw.spans_of(ids)
    ends, whole = starts + left, cuts.draw.ends[:, -1:]
    columns = (weights, weights / totals, _ranks(cuts, ids), left / whole, starts / whole, ends / whole)
    num_kept = np.count_nonzero(cuts.draw.weights, axis=1).tolist()
    for place, of_row in enumerate(zip(*(values.tolist() for values in columns), strict=True)):
        row, own = cuts.rows[place], params[place]
        of_weights, heated, ranks, *shares = (values[: len(ways[row].candidates)] for values in of_row)
        if own.temperature != 1.0:
            stages[row].append(StageView(TEMPERATURE, tuple(heated), own.temperature))
        for name, num_left, total in cuts.kept[place]:
            kept = [w / total if rank < num_left else 0.0 for w, rank in zip(of_weights, ranks, strict=True)]
            stages[row].append(StageView(name, tuple(kept), _value(own, name), num_kept=num_left))
        if own.typical_p < 1.0:
            stages[row].append(StageView(TYPICAL, tuple(shares[0]), own.typical_p, num_kept=num_kept[place]))
        stages[row].append(_draw_view(*shares))


def _ranks(cuts: CutDraws, token_ids: Ids) -> Ids:
    """Returns the places of tokens [r, k] in the ranking; for those that no cut has left, the number of places that any
    has."""
    most = max((num_left for of_row in cuts.kept for _, num_left, _ in of_row), default=1)
    ranked = cuts.ranking.token_ids[:, :most]
    order = np.argsort(ranked, axis=1)
    places, is_there = find(np.take_along_axis(ranked, order, axis=1), token_ids)
    ranks: Ids = np.where(is_there, np.take_along_axis(order, places, axis=1), most)
    return ranks


def _draw_view(shares: Sequence[float], starts: Sequence[float], ends: Sequence[float]) -> StageView:
    """Returns the view of the draw: tokens that have no share begin and end nowhere."""
    begin, end = (
        tuple([value if share > 0 else None for value, share in zip(values, shares, strict=True)])
        for values in (starts, ends)
    )
    return StageView(DRAW, tuple(shares), starts=begin, ends=end)


def _kept(ranking: Ranking, params: Sequence[SamplingParams]) -> list[list[tuple[str, int, float]]]:
    """Returns for each row of a ranking, cut by cut, how many tokens are left and the sum of their weights."""
    sums = np.cumsum(ranking.weights, axis=1)
    kept: list[list[tuple[str, int, float]]] = [[] for _ in params]
    left = np.full(len(params), ranking.weights.shape[1], dtype=np.int64)
    for name, rows, num_kept in processors.kept_by_cut(ranking.weights, ranking.totals, params):
        left[rows] = np.minimum(left[rows], num_kept)
        for row, num_left, total in zip(rows, left[rows].tolist(), sums[rows, left[rows] - 1].tolist(), strict=True):
            kept[row].append((name, num_left, total))
    return kept


def _value(params: SamplingParams, name: str) -> float | None:
    """Returns the parameter that has the stage's name, where it is a number."""
    value: Any = getattr(params, name, None)
    return value if isinstance(value, float | int) else None


def _padded(lists: Sequence[Sequence[float]]) -> NDArray[Any]:
    """Returns lists of numbers as an array, shorter ones filled up with their first."""
    width = max(map(len, lists))
    return np.array([[*values, *[values[0]] * (width - len(values))] for values in lists])
