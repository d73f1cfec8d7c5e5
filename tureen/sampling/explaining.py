"""Explains drawn tokens: the best candidates after each stage, as the pipeline itself computes them.

A row that is not explained costs nothing here, and one that is draws the same token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tureen.contract.params import SamplingParams
from tureen.contract.types import Explanation, StageView
from tureen.sampling import processors
from tureen.sampling.arithmetic import Arithmetic, Ids, Logits, Peaks, Ranking, Softmaxes, Spans, Values
from tureen.sampling.filtered import CutDraw, WatchCut
from tureen.sampling.slots import Slot

CANDIDATES = 8
"""Best tokens shown after each stage that changes logits. A token that is shown is shown at every stage."""

MODEL, PROCESSOR, GRAMMAR, TEMPERATURE, TYPICAL, DRAW = (
    "model", "custom_logit_processor", "grammar", "temperature", "typical_p", "draw",
)  # fmt: skip
"""Names of the stages that are not functions of processors.py under their parameter's name."""


class State(NamedTuple):
    """Some rows of logits as they were between two stages."""

    logits: Logits
    rows: Sequence[int]  # of the batch, one for each row of these logits
    peaks: Peaks
    names: Sequence[str]  # the stage that each row has behind it


class Cuts(NamedTuple):
    """The cuts of one row as they acted."""

    ranked: Ids  # [w]: the tokens, best first
    total: float  # of the weights of the whole vocabulary
    kept: Sequence[tuple[str, int, float]]  # of each cut: its parameter, how many tokens are left, their weights' sum
    draw: CutDraw


class RowDraw(NamedTuple):
    """The draw of one row: its random number, and its cuts, where there are any."""

    uniform: float
    cuts: Cuts | None = None


class Tracer:
    """Notes what the stages do to those rows of one step that are explained, and explains what was drawn."""

    def __init__(self, arithmetic: Arithmetic, logits: Logits, rows: Sequence[int]) -> None:
        self._arithmetic = arithmetic
        self._logits = logits
        self._names = dict.fromkeys(rows, MODEL)  # the last stage of each row
        self._states: list[State] = []
        self._draws: dict[int, RowDraw] = {}

    def before(self, stage: str, rows: Collection[int]) -> None:
        """Keeps the logits of rows that a stage is going to change."""
        changing = [row for row in rows if row in self._names]
        if not changing:
            return
        kept = self._arithmetic.copy(self._logits, changing)
        self._states.append(State(kept, changing, self._arithmetic.peaks(kept), [self._names[row] for row in changing]))
        self._names.update(dict.fromkeys(changing, stage))

    def drawing(self, rows: Sequence[int], uniforms: Values, params: Sequence[SamplingParams]) -> WatchCut:
        """Takes the random numbers [r] and the parameters of rows that are drawn. Returns what hears of their cuts."""
        numbers = zip(rows, uniforms.tolist(), strict=True)
        self._draws.update({row: RowDraw(uniform) for row, uniform in numbers if row in self._names})

        def watch(places: Sequence[int], ranking: Ranking, draw: CutDraw) -> None:
            indices = [index for index, place in enumerate(places) if rows[place] in self._draws]
            own = Ranking(ranking.token_ids[indices], ranking.weights[indices], ranking.totals[indices])
            kept = _kept(own, [params[places[index]] for index in indices])
            for index, token_ids, total, of_row in zip(indices, own.token_ids, own.totals.tolist(), kept, strict=True):
                row = rows[places[index]]
                cuts = Cuts(token_ids, total, of_row, CutDraw(*(values[index] for values in draw)))
                self._draws[row] = self._draws[row]._replace(cuts=cuts)

        return watch

    def explain(
        self, peaks: Peaks, batch: Sequence[Slot], positions: Sequence[int], tokens: Mapping[int, int]
    ) -> dict[int, Explanation]:
        """Returns the explanations of the rows that were noted and have a token. `peaks`: of the logits as they were
        drawn from."""
        rows = [row for row in self._names if row in tokens]
        if not rows:
            return {}
        index = np.array(rows, dtype=np.int64)
        names = [self._names[row] for row in rows]
        last = State(self._logits, rows, Peaks(peaks.values[index], peaks.token_ids[index]), names)
        candidates = self._candidates(last, index, tokens)
        stages: dict[int, list[StageView]] = {row: [] for row in rows}
        for state in self._states:
            self._view(state, np.arange(len(state.rows)), candidates, batch, stages)
        at_one = self._view(last, index, candidates, batch, stages)
        self._add_draws(last, index, candidates, batch, stages, at_one)
        return {
            row: _explanation(tokens[row], positions[row], self._draws.get(row), candidates[row], stages[row])
            for row in rows
        }

    def _add_draws(
        self,
        last: State,
        places: Ids,
        candidates: Mapping[int, Sequence[int]],
        batch: Sequence[Slot],
        stages: Mapping[int, list[StageView]],
        at_one: Spans,
    ) -> None:
        """Adds what follows the logits, of the rows that were drawn. places: where the rows stand in the logits;
        at_one: their spans at temperature 1, which most are drawn at."""
        drawn = [place for place, row in enumerate(last.rows) if row in self._draws]
        if not drawn:
            return
        rows = [last.rows[place] for place in drawn]
        temperatures = processors.temperature([batch[row].params for row in rows])
        softmaxes = Softmaxes(last.logits, places[drawn], last.peaks.values[drawn], temperatures)
        uncut = [place for place, row in enumerate(rows) if self._draws[row].cuts is None]
        heated = [place for place in uncut if temperatures[place] != 1.0]
        spans = {place: _of_row(at_one, drawn[place]) for place in uncut if temperatures[place] == 1.0}
        if heated:
            own = self._arithmetic.spans(softmaxes.of(heated), _padded([candidates[rows[place]] for place in heated]))
            spans |= {place: _of_row(own, index) for index, place in enumerate(heated)}
        for place, of_row in spans.items():
            row = rows[place]
            stages[row] += _uncut(batch[row].params, len(candidates[row]), of_row)
        for place, row in enumerate(rows):
            cuts = self._draws[row].cuts
            if cuts is not None:
                logits = np.array([-np.inf if logit is None else logit for logit in stages[row][-1].logits])
                weights = np.exp((logits - softmaxes.peaks[place]) / softmaxes.temperatures[place])
                stages[row] += _cut(batch[row].params, candidates[row], weights, cuts)

    def _candidates(self, last: State, index: Ids, tokens: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns the tokens that each row shows, those that were best at the end first, each once."""
        shown: dict[int, dict[int, None]] = {}
        width = CANDIDATES
        for row, best in zip(last.rows, self._arithmetic.best(self._logits, index, width).tolist(), strict=True):
            shown[row] = dict.fromkeys((*best, tokens[row]))
        for state in self._states:
            own = np.arange(len(state.rows))
            for row, best in zip(state.rows, self._arithmetic.best(state.logits, own, width).tolist(), strict=True):
                if row in shown:
                    shown[row].update(dict.fromkeys(best))
        return {row: list(ids) for row, ids in shown.items()}

    def _view(
        self,
        state: State,
        places: Ids,
        candidates: Mapping[int, Sequence[int]],
        batch: Sequence[Slot],
        stages: Mapping[int, list[StageView]],
    ) -> Spans:
        """Adds the view of one state to the stages of its rows. Returns their spans at temperature 1. places: where
        they stand in its logits."""
        ids = _padded([candidates.get(row, (0,)) for row in state.rows])
        softmaxes = Softmaxes(state.logits, places, state.peaks.values, np.ones(len(places)))
        spans = self._arithmetic.spans(softmaxes, ids)
        probabilities = (spans.weights / spans.totals[:, None]).tolist()
        logits = self._arithmetic.logits_at(state.logits, places, ids)
        finite = np.isfinite(logits).tolist()
        for row, name, shares, values, known in zip(
            state.rows, state.names, probabilities, logits.tolist(), finite, strict=True
        ):
            if row in stages:
                width = len(candidates[row])
                shown = tuple([value if is_finite else None for value, is_finite in zip(values, known, strict=True)])
                value = _value(batch[row].params, name)
                stages[row].append(StageView(name, tuple(shares[:width]), value, shown[:width]))
        return spans


def _of_row(spans: Spans, place: int) -> Spans:
    return Spans(*(values[place] for values in spans))


def _uncut(params: SamplingParams, count: int, spans: Spans) -> Iterator[StageView]:
    """Yields the stages behind the logits of a row without cuts. `spans`: at its temperature, of `count` candidates."""
    weights, starts, total = spans.weights[:count], spans.starts[:count], float(spans.totals)
    if params.temperature != 1.0:
        yield StageView(TEMPERATURE, tuple((weights / total).tolist()), params.temperature)
    yield _draw_view(starts, weights, total)


def _cut(params: SamplingParams, candidates: Sequence[int], weights: Values, cuts: Cuts) -> Iterator[StageView]:
    """Yields the stages behind the logits of a row with cuts, each together with those before it. weights: of the
    candidates, at its temperature."""
    if params.temperature != 1.0:
        yield StageView(TEMPERATURE, tuple((weights / cuts.total).tolist()), params.temperature)
    ids, most = np.array(candidates), max((num_left for _, num_left, _ in cuts.kept), default=0)
    is_ranked = cuts.ranked[:most, None] == ids
    ranks = np.where(is_ranked.any(axis=0), is_ranked.argmax(axis=0), most) if most else ids
    for name, num_left, total in cuts.kept:
        shares = np.where(ranks < num_left, weights, 0.0) / total
        yield StageView(name, tuple(shares.tolist()), _value(params, name), num_kept=num_left)
    starts, weights, total = cuts.draw.spans_of(ids)
    if params.typical_p < 1.0:
        num_kept = int(np.count_nonzero(cuts.draw.weights))
        yield StageView(TYPICAL, tuple((weights / total).tolist()), params.typical_p, num_kept=num_kept)
    yield _draw_view(starts, weights, total)


def _draw_view(starts: Values, weights: Values, total: float) -> StageView:
    begin, end = _of_possible(starts / total, weights), _of_possible((starts + weights) / total, weights)
    return StageView(DRAW, tuple((weights / total).tolist()), starts=begin, ends=end)


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


def _of_possible(values: Values, weights: Values) -> tuple[float | None, ...]:
    """Returns the values of tokens that have a weight, None of the others."""
    return tuple(
        [value if weight > 0 else None for value, weight in zip(values.tolist(), weights.tolist(), strict=True)]
    )


def _explanation(
    token_id: int, position: int, noted: RowDraw | None, candidates: Sequence[int], stages: Sequence[StageView]
) -> Explanation:
    return Explanation(
        token_id=token_id,
        position=position,
        chosen_by="best" if noted is None else "draw",
        random=None if noted is None else noted.uniform,
        candidates=tuple(candidates),
        stages=tuple(stages),
    )


def _value(params: SamplingParams, name: str) -> float | None:
    """Returns the parameter that has the stage's name, where it is a number."""
    value: Any = getattr(params, name, None)
    return value if isinstance(value, float | int) else None


def _padded(lists: Sequence[Sequence[int]]) -> Ids:
    """Returns token ids as an array, shorter lists filled up with token 0."""
    width = max(map(len, lists))
    return np.array([[*ids, *[0] * (width - len(ids))] for ids in lists], dtype=np.int64)
