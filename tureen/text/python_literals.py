"""Parses keyword arguments of a Python call, of literals only, to values of JSON."""

from __future__ import annotations

import ast
import re
from typing import Any

MAX_DEPTH = 64
TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\[\s\S])*"|'(?:[^'\\]|\\[\s\S])*')"""
    r"""|(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<mark>\*\*|[\[\](){},:=]))"""
)
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPE = re.compile(r"\\([\s\S])")
KNOWN_ESCAPES = "\n\\'\"abfnrtv01234567xuUN"
CLOSING = {"[": "]", "(": ")"}

Token = tuple[str, str]
"""Kind (string, number, name, mark, end) and text."""

END: Token = ("end", "")


def keyword_arguments(text: str) -> dict[str, Any]:
    """Parses the text between the parentheses of a call: `a=1, b="x"`, `**{"a": 1}`. Returns names -> values.

    Raises ValueError for anything else than literals that JSON can represent.
    """
    tokens = _tokens(text)
    return _Reader(tokens).arguments()


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no literal at {at}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return [*tokens, END]


class _Reader:
    """A recursive-descent parser."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def arguments(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self._next() != END:
            argument = self._argument()
            if values.keys() & argument.keys():
                raise ValueError("an argument is a duplicate")
            values |= argument
            if self._next() != END:
                self._expect(",")
        return values

    def _argument(self) -> dict[str, Any]:
        kind, text = self._take()
        if (kind, text) == ("mark", "**"):
            value = self._value(0)
            if not isinstance(value, dict):
                raise ValueError("** needs a dict")
            return value
        if kind != "name":
            raise ValueError("an argument needs a name")
        self._expect("=")
        return {text: self._value(0)}

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        kind, text = self._take()
        if kind == "string":
            return _literal(ESCAPE.sub(_known, text))
        if kind == "number":
            return _literal(text)
        if kind == "name" and text in CONSTANTS:
            return CONSTANTS[text]
        if text in CLOSING:
            return self._items(CLOSING[text], depth)
        if text == "{":
            return self._pairs(depth)
        raise ValueError(f"no literal: {text[:20]}")

    def _items(self, closing: str, depth: int) -> Any:
        items = []
        has_comma = False
        while self._next() != ("mark", closing):
            items.append(self._value(depth + 1))
            has_comma = self._next() == ("mark", ",")
            if has_comma:
                self._take()
            elif self._next() != ("mark", closing):
                raise ValueError("a comma is missing")
        self._take()
        return items[0] if closing == ")" and len(items) == 1 and not has_comma else items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs = {}
        while self._next() != ("mark", "}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key must be a string")
            self._expect(":")
            pairs[key] = self._value(depth + 1)
            if self._next() != ("mark", "}"):
                self._expect(",")
        self._take()
        return pairs

    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._tokens[self._at]
        if token == END:
            raise ValueError("it ends too early")
        self._at += 1
        return token

    def _expect(self, mark: str) -> None:
        if self._take() != ("mark", mark):
            raise ValueError(f"{mark} is missing")


def _known(escape: re.Match[str]) -> str:
    """Doubles the backslash of an escape that Python does not have: there it stands for itself, but Python warns."""
    return escape[0] if escape[1] in KNOWN_ESCAPES else "\\" + escape[0]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, MemoryError) as error:
        raise ValueError(str(error)) from None
