"""Atomic groups and possessive repeats: what a matcher without going back would have taken is all that they match."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from tureen.grammar.expression import EMPTY, Chain, Choice, Expression, GrammarError, Repeat
from tureen.grammar.regex_nodes import (
    ASSERTING,
    Alternatives,
    Look,
    Node,
    alternatives,
    char_set,
    sequence,
    unmarked,
)
from tureen.grammar.regular import continuations
from tureen.grammar.transitions import chain, is_nullable

MAX_STATES = 500

Refuse = Callable[[str], NoReturn]


def atomic(node: Node, refuse: Refuse) -> Node:
    """Returns what `(?>…)` matches of a node without lazy repeats: what is tried first."""
    if _is_certain(unmarked(node)):
        return node
    match node:
        case Alternatives(items) | Choice(items):
            return alternatives([_after_others(items[:at], item, refuse) for at, item in enumerate(items)])
        case Repeat(item, least, most):
            return possessive(item, least, most, refuse)
        case Chain(items):
            return _atomic_chain(items, refuse)
    return refuse("this atomic group is not supported: what it tries first is not certain from its characters")


def _after_others(earlier: tuple[Node, ...], item: Node, refuse: Refuse) -> Node:
    """An alternative is tried where no earlier one matches."""
    return sequence([*(Look(other, True) for other in earlier), atomic(item, refuse)])


def _atomic_chain(items: tuple[Expression, ...], refuse: Refuse) -> Node:
    first, rest = items[0], chain(items[1:])
    if is_nullable(rest):  # it matches whatever the first has taken
        return sequence([atomic(first, refuse), atomic(rest, refuse)])
    if isinstance(last := items[-1], Repeat) and last.least:  # its end is certain up to what must be there
        rest_of_last = Repeat(last.item, 0, None if last.most is None else last.most - last.least)
        items = (*items[:-1], Repeat(last.item, last.least, last.least), rest_of_last)
    for at in range(len(items) - 1, 0, -1):
        if _is_certain(chain(items[:at])):
            return sequence([*items[:at], atomic(chain(items[at:]), refuse)])
    return refuse("this atomic group is not supported: what it tries first is not certain from its characters")


def possessive(item: Node, least: int, most: int | None, refuse: Refuse) -> Node:
    """Returns what `item{least,most}+` matches: as many as there are."""
    if isinstance(item, ASSERTING) or not _is_certain(item):
        return refuse("a possessive repeat is supported only of what shows its end by itself, a character for instance")
    if most == 0 or item == EMPTY:
        return EMPTY
    if most == least:
        return Repeat(item, least, most)
    all_but_last = Repeat(item, least, None if most is None else most - 1)
    fewer = sequence([all_but_last, Look(item, True)])
    return fewer if most is None else alternatives([fewer, Repeat(item, most, most)])


def _is_certain(item: Expression) -> bool:
    """No text of it begins another one."""
    if char_set(item) is not None or item == EMPTY:
        return True
    try:
        return not is_nullable(item) and not continuations(item, MAX_STATES).ranges
    except GrammarError:
        return False
