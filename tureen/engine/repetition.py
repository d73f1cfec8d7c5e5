"""Detects an output that ends with copies of one pattern of tokens, at a constant cost for each token."""

from __future__ import annotations

from collections.abc import Sequence


class Repetition:
    """Looks for `count` consecutive copies of a pattern of `shortest` to `longest` tokens."""

    def __init__(self, shortest: int, longest: int, count: int) -> None:
        self._shortest, self._longest, self._count = shortest, longest, count
        self._runs: dict[int, int] = {}  # size -> number of last tokens equal to those `size` before; not 0
        self._num_seen = 0  # output tokens

    def ends(self, token_ids: Sequence[int], num_prompt: int) -> bool:
        """Adds the new output tokens. Returns whether the output ends with the copies."""
        for place in range(num_prompt + self._num_seen, len(token_ids)):
            token_id, most = token_ids[place], min(self._longest, place - num_prompt)
            self._runs = {
                size: self._runs.get(size, 0) + 1
                for size in range(self._shortest, most + 1)
                if token_ids[place - size] == token_id
            }
        self._num_seen = len(token_ids) - num_prompt
        return any(length >= size * (self._count - 1) for size, length in self._runs.items())
