"""A language as numbers, as the native code reads it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from tureen.grammar.expression import (
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    FreeText,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.rules import SOMETHING, can_be_empty, chain, choice, repeat

KINDS: dict[type, int] = {
    kind: number
    for number, kind in enumerate((Terminal, Text, Chars, Chain, Choice, Repeat, Both, Not, RuleCall, FreeText), -1)
}
"""The kinds of expressions, as the native code has them; a terminal is written as its item."""


def encoded(language: Language, kernels: ModuleType) -> NDArray[np.int32]:
    """Returns a language as the native code reads it: its rules' nodes, its start and those of its branches, then the
    nodes, parts first. Raises RuntimeError where it is nested too deep."""
    tree = kernels.closing_tree(dict(language.rules), [language.start, *language.branches], KINDS, _rewritten)
    return np.frombuffer(tree, dtype=np.int32)


def _rewritten(both: Both) -> Expression:
    """Returns an intersection as it is written: without itself where it only leaves out the empty text."""
    if SOMETHING not in (both.first, both.second):
        return both
    item = both.first if both.second == SOMETHING else both.second
    return both if isinstance(item, Both | Not) else nonempty(item)


def nonempty(expression: Expression) -> Expression:
    """Returns a regular expression of the same texts but the empty one, without an intersection where that can be."""
    if not can_be_empty(expression):
        return expression
    match expression:
        case Terminal(item):
            return nonempty(item)
        case Choice(items):
            return choice(nonempty(item) for item in items)
        case Chain(items):
            return choice(chain((nonempty(item), *items[at + 1 :])) for at, item in enumerate(items))
        case Repeat(item, least, most):
            rest = repeat(item, max(least - 1, 0), None if most is None else most - 1)
            return NOTHING if most == 0 else chain((nonempty(item), rest))
        case Both() | Not():
            return Both(expression, SOMETHING)
    return NOTHING
