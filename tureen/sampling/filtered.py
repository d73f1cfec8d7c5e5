"""Draws from the tokens that the cuts (processors.py) keep.

The most probable tokens are ranked on the host, as far down as the cuts reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tureen.contract.params import SamplingParams
from tureen.sampling.arithmetic import Arithmetic, Ids, Ranking, Softmaxes, Values
from tureen.sampling.processors import num_kept, typical_p

RANKING_WIDTHS = (256, 4096)  # tokens ranked at first, and where the cuts reach further; then the whole vocabulary
RANKED_TOGETHER = 1 << 16  # tokens; what is computed of them stays in a cache


def draw_filtered(
    arithmetic: Arithmetic, softmaxes: Softmaxes, params: Sequence[SamplingParams], uniforms: Values
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
                tokens[settled] = _draw(ranked, kept[is_settled], uniforms[settled], settled_params)
            reaching += np.array(part)[~is_settled].tolist()
        waiting = reaching
    return tokens


def _draw(ranking: Ranking, kept: Ids, uniforms: Values, params: Sequence[SamplingParams]) -> Ids:
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
    tokens: Ids = token_ids[rows, order[rows, place]]
    return tokens


def _parts(places: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(places), size):
        yield list(places[start : start + size])
