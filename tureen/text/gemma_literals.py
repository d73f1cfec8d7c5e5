"""Parses the arguments of a Gemma 4 call, `city:<|"|>Oslo<|"|>,days:[1,2]`, to values of JSON."""

from __future__ import annotations

import json
import re
from typing import Any

QUOTE = '<|"|>'
MAX_DEPTH = 64
TOKEN = re.compile(
    r'\s*(?:<\|"\|>(?P<text>[\s\S]*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\[\s\S])*")|(?P<mark>[{}\[\],:])'
    r'|(?P<bare>[^\s{}\[\],:"<][^{}\[\],:"<]*))'
)
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}

Token = tuple[str, str]
"""Kind (text, json, mark, bare, end) and content."""

END: Token = ("end", "")


def gemma_arguments(text: str) -> dict[str, Any]:
    """Parses an object with its braces.

    Strings are between `<|"|>` marks or in JSON quotes; keys and words may be bare. Raises ValueError for any other
    text.
    """
    reader = _Values(_tokens(text))
    value = reader.value(MAX_DEPTH)
    if not isinstance(value, dict) or reader.next() != END:
        raise ValueError("no object")
    return value


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no value at {at}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return [*tokens, END]


class _Values:
    """A recursive-descent parser."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def next(self) -> Token:
        return self._tokens[self._at]

    def value(self, depth: int) -> Any:
        kind, content = self._take()
        if (kind, content) == ("mark", "{") and depth:
            return dict(self._items("}", lambda: self._member(depth - 1)))
        if (kind, content) == ("mark", "[") and depth:
            return list(self._items("]", lambda: self.value(depth - 1)))
        if kind == "text":
            return content
        if kind == "json":
            return json.loads(content, strict=False)
        if kind != "bare":
            raise ValueError(f"no value: {content!r}")
        content = content.strip()
        return CONSTANTS[content] if content in CONSTANTS else _number_or_word(content)

    def _member(self, depth: int) -> tuple[str, Any]:
        kind, content = self._take()
        if kind in ("mark", "end") or self._take() != ("mark", ":"):
            raise ValueError(f"no key: {content!r}")
        key = json.loads(content, strict=False) if kind == "json" else content.strip() if kind == "bare" else content
        return key, self.value(depth)

    def _items(self, end: str, item: Any) -> Any:
        while self.next() != ("mark", end):
            yield item()
            if self.next() != ("mark", ","):
                break
            self._at += 1
        if self._take() != ("mark", end):
            raise ValueError(f"no {end}")

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at += token != END
        return token


def _number_or_word(text: str) -> Any:
    """Returns the text as a number if it is one, else the text."""
    try:
        return json.loads(text, parse_constant=int)  # int raises ValueError
    except ValueError:
        return text
