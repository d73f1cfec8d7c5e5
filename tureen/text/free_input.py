"""Reads the text that a custom tool takes: models write it as the argument `input` of a function, in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from tureen.text.messages import CallArguments, CallStart, Part, Tool

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_HEAD_CHARS = 64
MAX_ESCAPE_CHARS = 12  # of a pair of surrogates
WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Matches the longest beginning of a JSON string's inside that holds no unfinished escape."""


class FreeInputReader:
    """Reads the text out of a call's arguments, which come in pieces. Arguments of another form are returned
    unchanged."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_inside = False
        self._is_over = False
        self._is_raw = False

    def feed(self, text: str) -> str:
        """Reads a piece of the arguments and returns the text that is certain now."""
        if self._is_over:
            return ""
        self._rest += text
        if not self._is_inside and not self._is_raw:
            self._look()
        if self._is_raw:
            return self._taken()
        return self._inside() if self._is_inside else ""

    def close(self) -> str:
        """Returns the rest when the call has ended: arguments of another form, or an unfinished escape."""
        return "" if self._is_over else self._taken()

    def _look(self) -> None:
        head = HEAD.match(self._rest)
        if head:
            self._rest, self._is_inside = self._rest[head.end() :], True
        elif len(self._rest) > MAX_HEAD_CHARS:
            self._is_raw = True

    def _inside(self) -> str:
        end = _end(self._rest)
        text = json.loads(f'"{self._rest[:end]}"', strict=False)
        self._rest = self._rest[end:]
        self._is_over = self._rest.startswith('"')
        if self._rest.startswith("\\") and len(self._rest) > MAX_ESCAPE_CHARS:  # no escape that JSON has
            self._is_raw = True
            text += self._taken()
        return str(text)

    def _taken(self) -> str:
        text, self._rest = self._rest, ""
        return text


class FreeInputs:
    """Replaces the arguments of custom tools' calls by their texts."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools if tool.free_input is not None)
        self._open: tuple[int, FreeInputReader] | None = None  # the call that is being read

    def feed(self, parts: Sequence[Part], *, has_ended: bool) -> list[Part]:
        """Returns the parts as clients get them."""
        out_parts: list[Part] = []
        for part in parts:
            if isinstance(part, CallArguments) and self._open is not None and self._open[0] == part.index:
                self._add_text(out_parts, self._open[1].feed(part.text))
                continue
            if isinstance(part, CallStart):
                self._close(out_parts)
                self._open = (part.index, FreeInputReader()) if part.name in self._names else None
            out_parts.append(part)
        if has_ended:
            self._close(out_parts)
        return out_parts

    def _add_text(self, out_parts: list[Part], text: str) -> None:
        if text and self._open is not None:
            out_parts.append(CallArguments(self._open[0], text))

    def _close(self, out_parts: list[Part]) -> None:
        if self._open is not None:
            self._add_text(out_parts, self._open[1].close())
        self._open = None


def _end(text: str) -> int:
    match = WHOLE.match(text)
    return match.end() if match else 0
