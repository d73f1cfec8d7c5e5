"""Requested hidden states: the positions that are still to be computed, and the states that are still to be sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tureen.contract.types import HiddenStates


class HiddenStateQueue:
    """The hidden states that one sequence asked for.

    Positions are computed in order. Each state is sent once, even if its position is recomputed after a preemption.
    """

    def __init__(self, mode: HiddenStates, num_prompt: int, num_sent: int = 0) -> None:
        """num_sent: the number of states that another engine has already sent."""
        self._wanted = mode
        self._num_prompt = num_prompt
        self._next = num_sent  # the first position that is not computed yet
        self._ready: list[bytes] = []
        self._was_taken = num_sent > 0  # some of it was sent
        self._sum: NDArray[np.float64] | np.float64 = np.float64(0)  # over the positions so far, if they are pooled

    def first_needed(self) -> int | None:
        """Returns the position from which K/V must be computed, not read from the cache; None = all may be cached."""
        return self._next if self._wanted in ("all", "pooled") else None

    def asked_from(self, start: int, end: int, *, reaches_end: bool) -> int | None:
        """Returns, for a row of positions start … end - 1, the index in the row of the first that is asked for.

        reaches_end: whether the row draws a token.
        """
        if self._wanted in ("all", "pooled") and self._next < end:
            return max(0, self._next - start)
        if self._wanted == "last" and reaches_end:
            return end - start - 1
        return None

    def add(self, states: tuple[bytes, ...], num_computed: int) -> None:
        """Adds the states of the positions that a step computed; num_computed: the positions computed so far."""
        if self._wanted == "pooled":
            for state in states:  # one by one, so that the sum does not depend on how steps split the prompt
                self._sum = self._sum + np.frombuffer(state, np.float32)
            if num_computed == self._num_prompt:
                self._ready.append((self._sum / self._num_prompt).astype(np.float32).tobytes())
        else:
            if self._wanted == "last":
                self._ready.clear()
            self._ready += states
        self._next = num_computed

    def start_again(self) -> bool:
        """Recomputes all states, because the weights have changed. Returns False if some were already sent."""
        self._next, self._sum = 0, np.float64(0)
        self._ready.clear()
        return not self._was_taken

    def take(self, *, is_last: bool) -> tuple[bytes, ...]:
        """Returns the unsent states. If only the last position is requested, returns none before `is_last`."""
        if self._wanted == "last" and not is_last:
            return ()
        taken = tuple(self._ready)
        self._was_taken |= bool(taken)
        self._ready.clear()
        return taken
