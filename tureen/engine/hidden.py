"""Hidden states that a request asked for: which are still to be computed, which to be sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tureen.contract.types import HiddenStates


class HiddenStateQueue:
    """The hidden states that one sequence asked for. Positions are computed in order; each is sent once, whatever is
    computed again later."""

    def __init__(self, mode: HiddenStates, num_prompt: int, num_sent: int = 0) -> None:
        """num_sent: so many were sent by another engine."""
        self._wanted = mode
        self._num_prompt = num_prompt
        self._next = num_sent  # the first position that was not computed yet
        self._ready: list[bytes] = []
        self._was_taken = num_sent > 0  # some of it was sent
        self._sum: NDArray[np.float64] | np.float64 = np.float64(0)  # over the positions so far, where they are pooled

    def first_needed(self) -> int | None:
        """The position from which on K/V may not come from the cache; None = anything may."""
        return self._next if self._wanted in ("all", "pooled") else None

    def asked_from(self, start: int, end: int, *, reaches_end: bool) -> int | None:
        """Returns, for a row of positions start … end - 1, the index of the first that is asked for. `reaches_end`: it
        draws a token."""
        if self._wanted in ("all", "pooled") and self._next < end:
            return max(0, self._next - start)
        if self._wanted == "last" and reaches_end:
            return end - start - 1
        return None

    def add(self, states: tuple[bytes, ...], num_computed: int) -> None:
        if self._wanted == "pooled":
            for state in states:  # one by one: the sum does not depend on how the prompt was cut into steps
                self._sum = self._sum + np.frombuffer(state, np.float32)
            if num_computed == self._num_prompt:
                self._ready.append((self._sum / self._num_prompt).astype(np.float32).tobytes())
        else:
            if self._wanted == "last":
                self._ready.clear()
            self._ready += states
        self._next = num_computed

    def start_again(self) -> bool:
        """All of it is computed by another model. False where some was sent already."""
        self._next, self._sum = 0, np.float64(0)
        self._ready.clear()
        return not self._was_taken

    def take(self, *, is_last: bool) -> tuple[bytes, ...]:
        """Returns the states that are there, each once; where the last position alone is asked for, nothing before the
        end."""
        if self._wanted == "last" and not is_last:
            return ()
        taken = tuple(self._ready)
        self._was_taken |= bool(taken)
        self._ready.clear()
        return taken
