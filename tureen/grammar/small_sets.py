"""The strings of an expression that has few of them: sets of these are compared without automata."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tureen.grammar.expression import Chain, Chars, Choice, Expression, Repeat, Text

MAX_FEW = 64
MAX_CHARS = 4096  # of all of them


def few_strings(expression: Expression) -> list[str] | None:
    """Returns the strings of an expression, some more than once; None for more than MAX_FEW, or where a quick look does
    not tell."""
    match expression:
        case Text(text) if len(text) <= MAX_CHARS:
            return [text]
        case Chars(ranges) if sum(last - first + 1 for first, last in ranges) <= MAX_FEW:
            return [chr(point) for first, last in ranges for point in range(first, last + 1)]
        case Choice(items):
            return _joined(_either, [], items)
        case Chain(items):
            return _joined(_in_turn, [""], items)
        case Repeat(item, least, most) if most is not None and most <= MAX_FEW:
            return _repeated(item, least, most)
    return None


def _joined(
    join: Callable[[list[str], list[str]], list[str] | None], texts: list[str] | None, items: Iterable[Expression]
) -> list[str] | None:
    for item in items:
        few = few_strings(item)
        texts = None if few is None or texts is None else join(texts, few)
        if texts is None:
            return None
    return texts


def _either(first: list[str], second: list[str]) -> list[str] | None:
    return first + second if len(first) + len(second) <= MAX_FEW else None


def _in_turn(first: list[str], second: list[str]) -> list[str] | None:
    if len(first) * len(second) > MAX_FEW:
        return None
    if sum(map(len, first)) * len(second) + sum(map(len, second)) * len(first) > MAX_CHARS:
        return None
    return [text + more for text in first for more in second]


def _repeated(item: Expression, least: int, most: int) -> list[str] | None:
    once = few_strings(item) if most else []
    texts: list[str] | None = []
    so_often: list[str] | None = [""]
    for times in range(most + 1):
        if once is None or so_often is None or texts is None:
            return None
        texts = _either(texts, so_often) if times >= least else texts
        so_often = _in_turn(so_often, once) if times < most else so_often
    return texts
