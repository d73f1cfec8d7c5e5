"""Guesses of one sequence's next tokens, and how often they were right."""

from __future__ import annotations

from typing import Any

TRUST = 4.0  # verified guesses that weigh as much as the first chance
FADE = 0.97  # with each drawn token: an output may come to repeat what it did not


class Guesses:
    """The repetitions of one sequence: an index of its tokens, and how often guesses from it were right."""

    def __init__(self, history: Any) -> None:
        """`history`: a native History."""
        self.history = history
        self.num_guessed = 0
        self.num_right = 0
        self._verified = self._right = 0.0  # recent ones

    def chance(self, first: float) -> float:
        """Returns the chance that the next guess is right, if it was `first` before any was verified."""
        return (self._right + TRUST * first) / (self._verified + TRUST)

    def verified(self, num_guessed: int, num_right: int) -> None:
        """Takes in how many of a step's guesses were right. Those after the first wrong one were not verified."""
        self.num_guessed += num_guessed
        self.num_right += num_right
        fade = FADE ** (num_right + 1)
        self._verified = self._verified * fade + min(num_right + 1, num_guessed)
        self._right = self._right * fade + num_right
