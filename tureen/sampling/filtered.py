"""Draws from the tokens that the cuts (processors.py) keep.

The most probable tokens are ranked on the host, as far down as the cuts reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.contract.params import SamplingParams
from tureen.sampling.arithmetic import Arithmetic, Ids, Ranking, Softmaxes, Values
from tureen.sampling.processors import num_kept, typical_p

RANKING_WIDTHS = (256, 4096)  # tokens ranked at first, and where the cuts reach further; then the whole vocabulary
RANKED_TOGETHER = 1 << 16  # tokens; what is computed of them stays in a cache


class CutDraw(NamedTuple):
    """The tokens that rows were drawn from, in the order of ids: [r, w]; weights are zero where a cut has dropped
    them."""

    token_ids: Ids
    weights: Values
    ends: Values  # running sums of the weights

    def spans_of(self, token_ids: Ids) -> tuple[Values, Values]:
        """Returns the sums of the weights before some of the tokens [r, k], and their weights. The weight of a token
        that is not there is 0."""
        places, is_there = find(self.token_ids, token_ids)
        weights = np.where(is_there, np.take_along_axis(self.weights, places, axis=1), 0.0)
        before = np.take_along_axis(self.ends, np.maximum(places - 1, 0), axis=1)
        return np.where(places > 0, before, 0.0), weights


def find(ordered: Ids, token_ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    """Returns the places of tokens [r, k] in rows of ascending tokens [r, w], and whether they are there; if not, they
    have the place of another."""
    num_rows, width = ordered.shape
    rows = np.arange(num_rows)[:, None]
    beyond = rows << 32  # the tokens of a row come after those of the rows before it
    ends = np.searchsorted((ordered + beyond).ravel(), token_ids + beyond) - rows * width
    places: Ids = np.minimum(ends, width - 1)
    return places, np.take_along_axis(ordered, places, axis=1) == token_ids


WatchCut = Callable[[Sequence[int], Ranking, CutDraw], None]
"""Hears what some of the rows, named by their place, were drawn from."""


def draw_filtered(
    arithmetic: Arithmetic,
    softmaxes: Softmaxes,
    params: Sequence[SamplingParams],
    uniforms: Values,
    watch: WatchCut | None = None,
) -> Ids:
    """Draws one token for each of r rows from what the cuts of its parameters keep; returns their ids [r].

    The draw is by inverse CDF: in the order of ids, the first kept token whose running share of the kept probability
    exceeds its uniform. uniforms: [r].
    """
    vocab_size = softmaxes.logits.shape[1]
    tokens: Ids = np.zeros(len(params), dtype=np.int64)
    waiting: Sequence[int] = range(len(params))
    for width in (*RANKING_WIDTHS, vocab_size):
        reaching: list[int] = []
        for part in _parts(waiting, max(1, RANKED_TOGETHER // width)):
            ranking = arithmetic.rank(softmaxes.of(part), width)
            kept = num_kept(ranking.weights, ranking.totals, [params[place] for place in part])
            is_settled = (kept < width) | (width >= vocab_size)
            settled = np.array(part)[is_settled]
            if len(settled):
                ranked = Ranking(*(values[is_settled] for values in ranking))
                settled_params = [params[place] for place in settled]
                tokens[settled], drawn = _draw(ranked, kept[is_settled], uniforms[settled], settled_params)
                if watch is not None:
                    watch(settled.tolist(), ranked, drawn)
            reaching += np.array(part)[~is_settled].tolist()
        waiting = reaching
    return tokens


def _draw(ranking: Ranking, kept: Ids, uniforms: Values, params: Sequence[SamplingParams]) -> tuple[Ids, CutDraw]:
    """Draws tokens [r] from the first `kept` [r] of the ranking, the typical ones of them where a row asks for that.
    Sums go from the lowest id to the highest."""
    width = int(kept.max())
    token_ids, is_kept = ranking.token_ids[:, :width], np.arange(width) < kept[:, None]
    ranked = np.where(is_kept, ranking.weights[:, :width], 0.0)
    typical = [row for row, p in enumerate(params) if p.typical_p < 1.0]
    if typical:
        ranked[typical] *= typical_p(ranked[typical], [params[row].typical_p for row in typical])
    rows, order = np.arange(len(kept)), np.argsort(token_ids, axis=1)
    weights = ranked[rows[:, None], order]
    ends = np.cumsum(weights, axis=1)
    possible = weights > 0
    reached = (ends > (uniforms * ends[:, -1])[:, None]) & possible
    last = width - 1 - possible[:, ::-1].argmax(axis=1)  # where rounding leaves the last sum at the target
    place = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
    in_order = token_ids[rows[:, None], order]
    tokens: Ids = in_order[rows, place]
    return tokens, CutDraw(in_order, weights, ends)


def _parts(places: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield list(places[start : start + size])
