"""Hidden states that a request asked for: which are still to be computed, which to be sent."""

from __future__ import annotations

from tureen.types import HiddenStates


class HiddenStateQueue:
    """Of one sequence. Positions are computed in order; each is sent once, whatever is computed again later."""

    def __init__(self, wanted: HiddenStates) -> None:
        self._wanted = wanted
        self._next = 0  # the first position that was not computed yet
        self._ready: list[bytes] = []

    @property
    def is_wanted(self) -> bool:
        return self._wanted != "none"

    def first_needed(self) -> int | None:
        """The position from which on K/V may not come from the cache; None = anything may."""
        return self._next if self._wanted == "all" else None

    def asked_from(self, start: int, end: int, *, reaches_end: bool) -> int | None:
        """Of a row of positions start … end - 1, the index of the first asked for. `reaches_end`: it draws a token."""
        if self._wanted == "all" and self._next < end:
            return max(0, self._next - start)
        if self._wanted == "last" and reaches_end:
            return end - start - 1
        return None

    def add(self, states: tuple[bytes, ...], num_computed: int) -> None:
        if self._wanted == "last":
            self._ready.clear()
        self._ready += states
        self._next = num_computed

    def take(self, *, is_last: bool) -> tuple[bytes, ...]:
        """What is there, once; where the last position alone is wanted, nothing before the sequence has ended."""
        if self._wanted == "last" and not is_last:
            return ()
        taken = tuple(self._ready)
        self._ready.clear()
        return taken
