"""Finds the end of a JSON or Python value in a text that comes in pieces."""

from __future__ import annotations

import json
import re

CONTROL = re.compile(r"[\x00-\x1f]")
OPEN = {"}": "{", "]": "[", ")": "("}

JSON = re.compile(r'["{}\[\]]|[^ \t\r\nA-Za-z0-9.+\-,:]')
PYTHON = re.compile(r"""["'{}()\[\]]""")
"""Characters with a meaning between strings: quotes (small models write single ones in JSON too), brackets, and what
does not belong there at all."""

INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class Brackets:
    """Follows a value through its strings and brackets, without checking that it is valid otherwise."""

    def __init__(self, pattern: re.Pattern[str], opened: str = "") -> None:
        """`pattern`: JSON or PYTHON; `opened`: brackets that were opened before the text."""
        self.text: list[str] = []
        """The text that was passed, line breaks and other control characters in strings escaped: JSON allows none
        there."""
        self._pattern = pattern
        self._stack = list(opened)
        self._quote = ""
        self._is_escaped = False

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._stack)

    def take(self) -> str:
        """Returns the text that was passed since the last call."""
        text = "".join(self.text)
        self.text.clear()
        return text

    def step(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from text[at] until just behind the next bracket that is not in a string.

        Returns the new position and the bracket; "" at the end of the text; "!" when text[position] cannot be part of
        a value.
        """
        while at < len(text):
            if self._quote:
                at = self._in_string(text, at)
                continue
            match = self._pattern.search(text, at)
            if match is None:
                self.text.append(text[at:])
                return len(text), ""
            mark, end = match.group(), match.end()
            self.text.append(text[at : end - 1])
            if mark in INSIDE:
                self._quote = mark
            elif mark in "{[(":
                self._stack.append(mark)
            elif not self._stack or self._stack[-1] != OPEN.get(mark):
                return end - 1, "!"
            else:
                self._stack.pop()
            self.text.append(mark)
            if mark not in INSIDE:
                return end, mark
            at = end
        return at, ""

    def _in_string(self, text: str, at: int) -> int:
        start = at
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        match = INSIDE[self._quote].search(text, at)
        end = len(text) if match is None else match.end()
        if match is not None and match.group() == "\\":
            self._is_escaped = True
        elif match is not None:
            self._quote = ""
        self.text.append(CONTROL.sub(_escaped, text[start:end]))
        return end


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]
