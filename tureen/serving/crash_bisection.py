"""Finds the request that kills engines, by halves: decides which requests may run beside which after a death.

After one death all go on together. Who was there at two waits, and half of those are tried first; where the engine dies
again, half of these. Who comes out alone is tried without any other: when the engine dies with it then, and has died
three times in all, that request is refused. A trial is passed with a number of tokens that grows with every death, so
that requests that kill only now and then are found too.
"""

from __future__ import annotations

from collections.abc import Collection

POISON_AFTER = 3
GROWTH = 4
"""The factor by which the tokens that pass a trial grow with each death."""


class Trials:
    """Knows requests by their ids. It must be told of each that has ended."""

    def __init__(self) -> None:
        self.deaths: dict[str, int] = {}
        """The number of engines that died with each request. While it is empty, nothing is tried or held."""
        self._tried: dict[str, int] = {}  # with how many tokens each passes
        self._held: list[list[str]] = []  # groups that wait for their trial, the last one first
        self._is_alone = False  # what is tried now is one request, and nothing else runs

    def may_run(self, request_id: str) -> bool:
        """Says whether a request may run now."""
        if request_id in self._tried:
            return True
        return not self._is_alone and not any(request_id in group for group in self._held)

    def died(self, suspects: Collection[str]) -> str | None:
        """Notes that the engine has died while `suspects` ran. Returns the one that kills engines, if it is known
        now."""
        for request_id in suspects:
            self.deaths[request_id] = self.deaths.get(request_id, 0) + 1
        tried = [request_id for request_id in self._tried if request_id in suspects]
        if self._is_alone and tried and self.deaths[tried[0]] >= POISON_AFTER:
            self.ended(tried[0])
            return tried[0]
        wary = [request_id for request_id in suspects if self.deaths[request_id] > 1 and request_id not in tried]
        unheard = [
            request_id for request_id in self._tried if request_id not in suspects
        ]  # the engine did not come so far
        self._held = [*([wary + unheard] if tried else [unheard]), *self._held, tried or wary]
        self._tried = {}
        self._next()
        self._is_alone = len(self._tried) == 1
        return None

    def survived(self, request_id: str, num_tokens: int) -> bool:
        """Notes that tokens of a request came. Returns whether others may run now that could not before."""
        if request_id not in self._tried:
            return False
        self._tried[request_id] -= num_tokens
        if self._tried[request_id] > 0:
            return False
        del self._tried[request_id]
        return self._next()

    def ended(self, request_id: str) -> bool:
        """Notes that a request has ended. Returns whether others may run now that could not before."""
        if self.deaths.pop(request_id, 0) < 2:
            return False
        self._held = [[member for member in group if member != request_id] for group in self._held]
        return self._tried.pop(request_id, None) is not None and self._next()

    def _next(self) -> bool:
        """Tries half of the next group if no request is being tried. Returns whether others may run now."""
        if self._tried:
            return False
        while self._held and not self._held[-1]:
            self._held.pop()
        group = self._held.pop() if self._held else []
        half = (len(group) + 1) // 2
        self._held += [group[half:]] if group[half:] else []
        self._tried = {member: GROWTH ** max(0, self.deaths[member] - 2) for member in group[:half]}
        self._is_alone = False
        return True
