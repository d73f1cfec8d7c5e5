"""Finds where an output stops: stop strings and stop patterns in text that comes in pieces."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from tureen.errors import RequestFailed

if TYPE_CHECKING:
    import regex

SEARCH_TIMEOUT_S: Final = 0.05  # CPU time of one search, and of all searches for one token
SEARCH_PER_TOKEN_S: Final = 0.002  # CPU time per token on average
LOOKBEHIND_CHARS: Final = 1024  # kept before text that can still match, for look-behind and word borders


class Match(NamedTuple):
    """A match of a stop. Positions count characters of the whole output; matches sort by start, then end."""

    start: int
    end: int
    text: str
    pattern: str = ""  # the stop pattern; "" = a stop string


class StopStrings:
    """Finds stop strings by Knuth-Morris-Pratt (SIAM J. Comput. 6(2), 1977), for all at once; only stops of which a
    prefix has just been read cost time."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._by_first: dict[str, list[int]] = {}
        for index, stop in enumerate(self._stops):
            self._by_first.setdefault(stop[0], []).append(index)
        self._matched: dict[int, int] = {}  # index of a stop -> length of its longest prefix that the text ends with
        self._length = 0

    def feed(self, text: str) -> list[Match]:
        """Reads a piece of text and returns the matches that it completes."""
        matches: list[Match] = []
        for char in text:
            self._length += 1
            if self._matched or char in self._by_first:
                self._advance(char, matches)
        return matches

    @property
    def hold_from(self) -> int:
        """Position of the longest unfinished stop: the text before it is safe to send."""
        return self._length - max(self._matched.values(), default=0)

    def _advance(self, char: str, matches: list[Match]) -> None:
        matched: dict[int, int] = {}
        for index in dict.fromkeys([*self._matched, *self._by_first.get(char, ())]):
            stop, length = self._stops[index], self._matched.get(index, 0)
            while length and stop[length] != char:
                length = _borders(stop)[length - 1]
            length += stop[length] == char
            if length == len(stop):
                matches.append(Match(self._length - length, self._length, stop))
                length = _borders(stop)[length - 1]
            if length:
                matched[index] = length
        self._matched = matched


@lru_cache(maxsize=1024)
def _borders(text: str) -> array[int]:
    """Returns for each prefix of `text` the length of the longest shorter prefix that it ends with."""
    borders = array("H", [0])
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length - 1]
        length += text[length] == char
        borders.append(length)
    return borders


class StopPatterns:
    """Finds stop patterns, regular expressions of the package `regex`. A match counts as soon as the text so far
    matches; text that may begin one is held back.

    Look-behind sees 1024 characters. Searches may take 50 ms of CPU time for one token and 2 ms on average.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        import regex  # noqa: PLC0415 - imported when first needed, not at start-up

        self._patterns = [regex.compile(pattern) for pattern in dict.fromkeys(patterns)]
        self._starts = [0] * len(self._patterns)  # first position at which a match of each may still begin
        self._text = ""
        self._dropped = 0  # characters of the output before self._text
        self._budget_s = SEARCH_TIMEOUT_S

    def feed(self, text: str, *, ignore: bool) -> list[Match]:
        """Reads a piece of text and returns the leftmost match of each pattern. `ignore`: skips matches for good.

        Raises RequestFailed when searching takes too long.
        """
        self._text += text
        self._budget_s = min(self._budget_s + SEARCH_PER_TOKEN_S, SEARCH_TIMEOUT_S)
        matches: list[Match] = []
        for index, pattern in enumerate(self._patterns):
            match = self._search(pattern, index)
            while match is not None and ignore and match.start < self._length:
                self._starts[index] = match.start + 1
                match = self._search(pattern, index)
            if match is None:
                partial = self._search(pattern, index, partial=True)
                self._starts[index] = self._length if partial is None else partial.start
            elif not ignore:
                self._starts[index] = match.start
                matches.append(match)
        self._forget()
        return matches

    @property
    def hold_from(self) -> int:
        """Position of the earliest match that later text may complete: the text before it is safe to send."""
        return min(self._starts, default=self._length)

    @property
    def _length(self) -> int:
        return self._dropped + len(self._text)

    def _search(self, pattern: regex.Pattern[str], index: int, *, partial: bool = False) -> Match | None:
        started = time.thread_time()
        at = self._starts[index] - self._dropped
        try:
            match = pattern.search(self._text, at, partial=partial, timeout=SEARCH_TIMEOUT_S)
        except TimeoutError:
            raise _too_slow() from None
        self._budget_s -= time.thread_time() - started
        if self._budget_s < 0:
            raise _too_slow()
        if match is None:
            return None
        return Match(match.start() + self._dropped, match.end() + self._dropped, match.group(), pattern.pattern)

    def _forget(self) -> None:
        unneeded = self.hold_from - self._dropped - LOOKBEHIND_CHARS
        if unneeded > len(self._text) // 2:
            self._text = self._text[unneeded:]
            self._dropped += unneeded


def _too_slow() -> RequestFailed:
    return RequestFailed(
        "sampling_params.stop_regex takes too long to match; make it simpler",
        field="sampling_params.stop_regex",
        code="stop_regex_timeout",
    )
