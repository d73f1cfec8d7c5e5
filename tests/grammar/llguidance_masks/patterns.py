"""Regular expression trees in the syntax of Rust's regex crate, which llguidance and outlines read."""

from __future__ import annotations

import re

from tureen.grammar.expression import (
    ANY_CHAR,
    MAX_CODE_POINT,
    SURROGATES,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ,:;\"'<>=!@%")
"""Characters that stand for themselves everywhere in a pattern."""

OTHERS = re.compile(f"[^{re.escape(''.join(sorted(PLAIN)))}]")
NO_CHAR = r"[^\x{0}-\x{10ffff}]"
MAX_DEPTH = 200


def pattern(expression: Expression, depth: int = MAX_DEPTH) -> str:
    """Returns a pattern that can be put before and after others, and be repeated in a group of its own.

    Raises GrammarError for what is nested too deep, and ValueError for Both, Not and Call.
    """
    if not depth:
        raise GrammarError(f"the expression is nested too deep: at most {MAX_DEPTH} levels")
    match expression:
        case Text(text):
            return OTHERS.sub(lambda match: char(match[0]), text)
        case Chars(ranges):
            return char_class(ranges)
        case Chain(items):
            return "".join([pattern(item, depth - 1) for item in items])
        case Choice(items):
            return f"(?:{'|'.join([pattern(item, depth - 1) for item in items])})" if items else NO_CHAR
        case Repeat(item, least, most):
            return grouped(item, pattern(item, depth - 1)) + count(least, most)
        case Terminal(item):
            return pattern(item, depth - 1)
        case Both() | Not() | RuleCall():
            raise ValueError(f"not a plain regular expression: {type(expression).__name__}")


def grouped(expression: Expression, written: str) -> str:
    """Returns the pattern, in a group where what follows would otherwise repeat only its last part."""
    return written if isinstance(expression, Chars | Choice) else f"(?:{written})"


def count(least: int, most: int | None) -> str:
    """Returns the suffix that says how often the pattern before it is repeated."""
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def char(character: str) -> str:
    """Returns the pattern of one character, literally."""
    return character if character in PLAIN else f"\\x{{{ord(character):x}}}"


def char_class(ranges: tuple[tuple[int, int], ...]) -> str:
    """Returns the pattern of any character of these ranges."""
    if ranges == ANY_CHAR.ranges:
        return "(?s:.)"
    if not ranges:
        return NO_CHAR
    if ranges[-1][1] == MAX_CODE_POINT:  # much of Unicode: what is left out is shorter
        return f"[^{''.join(_range(*span) for span in _gaps(ranges))}]"
    return f"[{''.join(_range(*span) for span in ranges)}]"


def _gaps(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The ranges before and between these, without surrogates."""
    points = [0, *(last + 1 for _, last in ranges[:-1])]
    gaps = []
    for first, (after, _) in zip(points, ranges, strict=True):
        gaps += [(first, min(after, SURROGATES[0]) - 1), (max(first, SURROGATES[1] + 1), after - 1)]
    return sorted({(first, last) for first, last in gaps if first <= last})


def _range(first: int, last: int) -> str:
    return char(chr(first)) if first == last else f"{char(chr(first))}-{char(chr(last))}"
