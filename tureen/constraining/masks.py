"""The masks of a step's constrained rows, computed by a thread of their own while the forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tureen.grammar import GrammarError, Mask

Fill = Callable[[Sequence[Mask]], None]
"""Writes all words of each mask. Raises GrammarError."""


class MaskThread:
    """Fills masks [vocab_size bits] by slot. One step at a time."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._masks = np.zeros((max_rows, -(-vocab_size // 32)), dtype=np.uint32)
        self._executor = ThreadPoolExecutor(1, "masks")  # starts its thread with the first step that needs it

    def start(self, fills: Mapping[int, Fill], num_masks: Mapping[int, int]) -> PendingMasks:
        """Begin to fill the masks of these slots: so many of each."""
        masks = {slot: (self._masks[slot], *self._more(num_masks[slot] - 1)) for slot in fills}
        try:
            return PendingMasks(masks, self._executor.submit(_fill, masks, fills))
        except RuntimeError:  # the system starts no thread; the executor keeps what it could not begin
            self._executor = ThreadPoolExecutor(1, "masks")
            filled: Future[dict[int, str]] = Future()
            filled.set_result(_fill(masks, fills))
            return PendingMasks(masks, filled)

    def close(self) -> None:
        self._executor.shutdown()

    def _more(self, count: int) -> Sequence[Mask]:
        return list(np.zeros((count, self._masks.shape[1]), dtype=np.uint32)) if count else ()


class PendingMasks:
    """Masks that are being filled."""

    def __init__(self, masks: Mapping[int, Sequence[Mask]], failures: Future[dict[int, str]]) -> None:
        self._masks = masks
        self._failures = failures

    def wait(self) -> Mapping[int, Sequence[Mask]]:
        """Returns, by slot, a mask for each token that may be drawn. One that could not be computed allows nothing."""
        self._failures.result()
        return self._masks

    @property
    def failures(self) -> Mapping[int, str]:
        """Returns, for each slot whose mask could not be computed, the reason. Waits."""
        return self._failures.result()


def _fill(masks: Mapping[int, Sequence[Mask]], fills: Mapping[int, Fill]) -> dict[int, str]:
    failures: dict[int, str] = {}
    for slot, fill in fills.items():
        try:
            fill(masks[slot])
        except GrammarError as error:
            for mask in masks[slot]:
                mask[:] = 0
            failures[slot] = str(error)
    return failures
