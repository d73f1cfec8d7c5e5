"""Finds the tokens that would complete a sequence of tokens that the output may not have."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tureen.sampling.arithmetic import Ids


class Banned:
    """The sequences that one output may not have, and as many of its last tokens as they can tell of."""

    def __init__(self, sequences: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> None:
        """sequences: each of at least one token. output_ids: the output so far."""
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # those of several tokens, by the last but one
        for sequence in sequences:
            if len(sequence) > 1:
                self._longer.setdefault(sequence[-2], []).append(sequence)
        self._always = sorted({sequence[0] for sequence in sequences if len(sequence) == 1})
        most = max(map(len, sequences)) - 1
        self._recent: deque[int] = deque(output_ids[-most:] if most else (), maxlen=most)

    def add(self, token_id: int) -> None:
        """Takes the next token of the output."""
        self._recent.append(token_id)

    def next_ids(self) -> Ids:
        """Returns the tokens that may not come next."""
        recent = tuple(self._recent)
        candidates = self._longer.get(recent[-1], ()) if recent else ()
        completing = {
            sequence[-1]
            for sequence in candidates
            if len(sequence) <= len(recent) + 1 and recent[len(recent) - len(sequence) + 1 :] == sequence[:-1]
        }
        return np.array(sorted(completing.union(self._always)), dtype=np.int64)
