"""The edges of the strings that an expression matches: the empty string, one character, what begins or ends with some
character."""

from __future__ import annotations

from collections.abc import Iterable

from tureen.grammar.alphabet import Ranges
from tureen.grammar.char_sets import intersection
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    NOTHING,
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

MAX_OPTIONAL = 3  # items that may be left out before the edge, before an intersection is smaller


def chain(items: Iterable[Expression]) -> Expression:
    """Returns the items one after the other, as a chain without chains in it."""
    parts: list[Expression] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        if isinstance(item, Chain):
            parts += item.items
        elif item != EMPTY:
            parts.append(item)
    return Chain(tuple(parts)) if len(parts) > 1 else parts[0] if parts else EMPTY


def either(items: Iterable[Expression]) -> Expression:
    """Returns any of the items, as a choice without choices in it."""
    parts: dict[Expression, None] = {}
    for item in items:
        parts.update(dict.fromkeys(item.items if isinstance(item, Choice) else (item,)))
    return Choice(tuple(parts)) if len(parts) != 1 else next(iter(parts))


def chars(ranges: Ranges) -> Expression:
    """Returns one character of these."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return Text(chr(ranges[0][0]))
    return Chars(ranges) if ranges else NOTHING


def is_nullable(node: Expression) -> bool:
    """Whether it matches the empty string."""
    match node:
        case Text(text):
            return not text
        case Chain(items):
            return all(is_nullable(item) for item in items)
        case Choice(items):
            return any(is_nullable(item) for item in items)
        case Repeat(item, least, _):
            return least == 0 or is_nullable(item)
        case Both(first, second):
            return is_nullable(first) and is_nullable(second)
        case Not(item):
            return not is_nullable(item)
        case Terminal(item):
            return is_nullable(item)
    return False


def matches_char(node: Expression, char: str) -> bool:
    """Whether it matches exactly this character."""
    match node:
        case Text(text):
            return text == char
        case Chars(ranges):
            return any(first <= ord(char) <= last for first, last in ranges)
        case Chain(items):
            return _chain_matches_char(items, char)
        case Choice(items):
            return any(matches_char(item, char) for item in items)
        case Repeat(item, least, most):
            return most != 0 and matches_char(item, char) and (least < 2 or is_nullable(item))
        case Both(first, second):
            return matches_char(first, char) and matches_char(second, char)
        case Not(item):
            return not matches_char(item, char)
        case Terminal(item):
            return matches_char(item, char)
    return False


def _chain_matches_char(items: tuple[Expression, ...], char: str) -> bool:
    needed = [item for item in items if not is_nullable(item)]
    return len(needed) < 2 and any(matches_char(item, char) for item in needed or items)


def beginning(node: Expression, ranges: Ranges) -> Expression:
    """Returns an expression of the matches that begin with one of these characters."""
    return _at_edge(node, ranges, True)


def ending(node: Expression, ranges: Ranges) -> Expression:
    """Returns an expression of the matches that end with one of these characters."""
    return _at_edge(node, ranges, False)


def _at_edge(node: Expression, ranges: Ranges, is_first: bool) -> Expression:
    match node:
        case Text(text):
            edge = ord(text[0 if is_first else -1]) if text else -1
            return node if any(first <= edge <= last for first, last in ranges) else NOTHING
        case Chars(own):
            return chars(intersection(own, ranges))
        case Choice(items):
            return either(_at_edge(item, ranges, is_first) for item in items)
        case Chain(items):
            return _chain_at_edge(items, ranges, is_first)
        case Repeat(item, least, most):
            part = _at_edge(item, ranges, is_first)
            if part == item and most is None and least < 2:
                return Repeat(item, 1)
            others = Repeat(item, max(least - 1, 0), None if most is None else most - 1)
            return chain((part, others) if is_first else (others, part))
        case Both(first, second):
            return Both(_at_edge(first, ranges, is_first), second)
        case Terminal(item):
            return _at_edge(item, ranges, is_first)
        case RuleCall(name):
            raise GrammarError(f"rule {name} is not regular")
    return _intersected(node, ranges, is_first)


def _chain_at_edge(items: tuple[Expression, ...], ranges: Ranges, is_first: bool) -> Expression:
    order = items if is_first else items[::-1]
    options = []
    for number, item in enumerate(order):
        if number > MAX_OPTIONAL:
            return _intersected(Chain(items), ranges, is_first)
        edge, others = _at_edge(item, ranges, is_first), order[number + 1 :]
        options.append(chain((edge, *others) if is_first else (*others[::-1], edge)))
        if not is_nullable(item):
            break
    return either(options)


def _intersected(node: Expression, ranges: Ranges, is_first: bool) -> Expression:
    if ranges == ANY_CHAR.ranges:
        return Both(node, Repeat(ANY_CHAR, 1))
    edge = chars(ranges)
    return Both(node, Chain((edge, ANYTHING) if is_first else (ANYTHING, edge)))
