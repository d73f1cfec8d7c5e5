"""The masks of a step's constrained rows, computed by a thread of their own while the forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from tureen.grammar import GrammarError, Mask
from tureen.grammar.base import Ending
from tureen.sandbox.stacks import DeepExecutor

Fill = Callable[[Sequence[Mask]], Sequence[Ending | None]]
"""Writes all words of each mask, and returns what belongs to each. Raises GrammarError."""


class Filled(NamedTuple):
    """The results of filling a step's masks, by slot."""

    endings: dict[int, Sequence[Ending | None]]  # where the end of an output is near
    failures: dict[int, str]


class MaskThread:
    """Fills masks [vocab_size bits] by slot. One step at a time."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._masks = np.zeros((max_rows, -(-vocab_size // 32)), dtype=np.uint32)
        self._executor = DeepExecutor(1, "masks")  # starts its thread with the first step that needs it

    def start(self, fills: Mapping[int, Fill], num_masks: Mapping[int, int]) -> PendingMasks:
        """Begin to fill the masks of these slots, a number for each."""
        masks = {slot: (self._masks[slot], *self._more(num_masks[slot] - 1)) for slot in fills}
        try:
            return PendingMasks(masks, self._executor.submit(_fill, masks, fills))
        except RuntimeError:  # the system starts no thread; the executor keeps what it could not begin
            self._executor = DeepExecutor(1, "masks")
            filled: Future[Filled] = Future()
            filled.set_result(_fill(masks, fills))
            return PendingMasks(masks, filled)

    def close(self) -> None:
        self._executor.shutdown()

    def _more(self, count: int) -> Sequence[Mask]:
        return list(np.zeros((count, self._masks.shape[1]), dtype=np.uint32)) if count else ()


class PendingMasks:
    """Masks that are being filled."""

    def __init__(self, masks: Mapping[int, Sequence[Mask]], filled: Future[Filled]) -> None:
        self._masks = masks
        self._filled = filled

    def wait(self) -> Mapping[int, Sequence[Mask]]:
        """Returns, by slot, a mask for each token that may be drawn. One that could not be computed allows nothing."""
        self._filled.result()
        return self._masks

    @property
    def endings(self) -> Mapping[int, Sequence[Ending | None]]:
        """Returns, for the slots whose outputs are near their end, what belongs to each of their masks. Waits."""
        return self._filled.result().endings

    @property
    def failures(self) -> Mapping[int, str]:
        """Returns, for each slot whose mask could not be computed, the reason. Waits."""
        return self._filled.result().failures


def _fill(masks: Mapping[int, Sequence[Mask]], fills: Mapping[int, Fill]) -> Filled:
    endings: dict[int, Sequence[Ending | None]] = {}
    failures: dict[int, str] = {}
    for slot, fill in fills.items():
        try:
            of_slot = fill(masks[slot])
            if any(of_slot):
                endings[slot] = of_slot
        except GrammarError as error:
            for mask in masks[slot]:
                mask[:] = 0
            failures[slot] = str(error)
    return Filled(endings, failures)
