"""Whether a text is in a language, by brute force over the expression tree: what the tests of grammars compare with."""

from __future__ import annotations

from functools import partial

from tureen.grammar.expression import (
    SURROGATES,
    Both,
    Chain,
    Chars,
    Choice,
    FreeText,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)


def matches(language, text):
    """Whether the whole text is in the language. A left-recursive rule is an error."""
    return len(text) in _ends(language.start, 0, text, language.rules, {})


def matches_expression(expression, text):
    """The same for a regular expression tree."""
    return matches(Language(expression), text)


def _ends(node, start, text, rules, known):
    """Where in the text a match of the node that begins at `start` can end."""
    key = (id(node), start)
    if key not in known:
        known[key] = None  # being worked out
        known[key] = frozenset(
            _worked_out(node, start, text, partial(_ends, text=text, rules=rules, known=known), rules)
        )
    if known[key] is None:
        raise RecursionError(f"left recursion at {start} in {str(node)[:100]}")
    return known[key]


def _worked_out(node, start, text, ends, rules):
    match node:
        case Text(wanted):
            return {start + len(wanted)} if text.startswith(wanted, start) else set()
        case Chars(ranges):
            found = start < len(text) and any(first <= ord(text[start]) <= last for first, last in ranges)
            return {start + 1} if found else set()
        case Chain(items):
            here = {start}
            for item in items:
                here = {end for place in here for end in ends(item, place)}
            return here
        case Choice(items):
            return {end for item in items for end in ends(item, start)}
        case Repeat(item, least, most):
            return _repeated(item, least, most, {start}, ends)
        case Terminal(item) | FreeText(item):
            return ends(item, start)
        case RuleCall(name):
            return ends(rules[name], start)
    return _of_sets(node, start, text, ends)


def _of_sets(node, start, text, ends):
    match node:
        case Both(first, second):
            return ends(first, start) & ends(second, start)
        case Not(item):
            return {end for end in range(start, len(text) + 1) if _no_surrogates(text[start:end])} - ends(item, start)
    raise TypeError(f"not an expression: {node!r}")


def _repeated(item, least, most, here, ends):
    for _ in range(least):
        after = {end for place in here for end in ends(item, place)}
        if after == here:
            break
        here = after
    found, fresh, count = set(here), here, least
    while fresh and (most is None or count < most):
        fresh = {end for place in fresh for end in ends(item, place)} - found
        found |= fresh
        count += 1
    return found


def _no_surrogates(text):
    return not any(SURROGATES[0] <= ord(char) <= SURROGATES[1] for char in text)
