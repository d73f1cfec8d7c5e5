"""Notes the tokens that could be drawn, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from tureen.contract.types import PositionLogprobs
from tureen.sampling.arithmetic import Ranking
from tureen.sampling.filtered import CutDraw, WatchCut


class Supports:
    """Notes which tokens the cuts of some rows of a step have kept, and their weights."""

    def __init__(self, rows: Collection[int]) -> None:
        self._rows = rows
        self._weights: dict[int, dict[int, float]] = {}  # of each kept token, by row

    def watch(self, rows: Sequence[int], then: WatchCut | None) -> WatchCut:
        """Returns the function to be called with the draws of `rows`; it calls `then`, too."""

        def note(places: Sequence[int], ranking: Ranking, draw: CutDraw) -> None:
            for index, place in enumerate(places):
                if rows[place] in self._rows:
                    kept = draw.weights[index] > 0
                    weights = draw.weights[index, kept].tolist()
                    self._weights[rows[place]] = dict(zip(draw.token_ids[index, kept].tolist(), weights, strict=True))
            if then is not None:
                then(places, ranking, draw)

        return note

    def add_to(self, reports: dict[int, PositionLogprobs], tokens: Mapping[int, int]) -> None:
        """Adds to the reports of rows the tokens that could be drawn, and the logarithm of the drawn one's share."""
        for row, weights in self._weights.items():
            share = weights[tokens[row]] / math.fsum(weights.values())
            reports[row] = msgspec.structs.replace(reports[row], support=tuple(weights), share=math.log(share))
