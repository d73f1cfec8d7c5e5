"""The strings of an expression that has few of them: sets of these are compared without automata."""

from __future__ import annotations

from collections.abc import Iterable

from tureen.grammar.expression import Chain, Chars, Choice, Expression, Repeat, Text

MAX_FEW = 64


def few_strings(expression: Expression) -> list[str] | None:
    """Returns the strings of an expression, some more than once; None for more than MAX_FEW, or where a quick look does
    not tell."""
    texts: list[str] = []
    match expression:
        case Text(text):
            texts = [text]
        case Chars(ranges) if sum(last - first + 1 for first, last in ranges) <= MAX_FEW:
            texts = [chr(point) for first, last in ranges for point in range(first, last + 1)]
        case Choice(items):
            for item in items:
                some = few_strings(item)
                if some is None or len(texts) + len(some) > MAX_FEW:
                    return None
                texts += some
        case Chain(items):
            return _in_turn(items)
        case Repeat(item, least, most) if most is not None and most <= MAX_FEW:
            for times in range(least, most + 1):
                some = _in_turn((item,) * times)
                if some is None or len(texts) + len(some) > MAX_FEW:
                    return None
                texts += some
        case _:
            return None
    return texts


def _in_turn(items: Iterable[Expression]) -> list[str] | None:
    """The same of strings one after the other."""
    texts = [""]
    for item in items:
        some = few_strings(item)
        if some is None or len(texts) * len(some) > MAX_FEW:
            return None
        texts = [text + more for text in texts for more in some]
    return texts
