"""Random strings of an expression, patterns with a small change, and what Python says of them."""

from __future__ import annotations

import re
import warnings

from tureen.grammar.expression import Chain, Chars, Choice, Repeat, Text


def drawn(node, rng):
    """A random string of the expression."""
    match node:
        case Text(text):
            return text
        case Chars(ranges):
            return chr(rng.randint(*rng.choice(ranges)))
        case Chain(items):
            return "".join(drawn(item, rng) for item in items)
        case Choice(items):
            return drawn(rng.choice(items), rng)
        case Repeat(item, least, most):
            most = least + 4 if most is None else most
            return "".join(drawn(item, rng) for _ in range(rng.choice([least, most, rng.randint(least, most)])))
    raise TypeError(node)


def changes(text, rng):
    """The text with one character left out, put in and exchanged."""
    at, new = rng.randrange(len(text) + 1), rng.choice("()[]{}\\*+?|a-1,^$=!<:ux09fFdw")
    return text[:at] + text[at + 1 :], text[:at] + new + text[at:], text[:at] + new + text[at + 1 :]


def patterns_in(value):
    if isinstance(value, dict) and isinstance(value.get("pattern"), str):
        yield value["pattern"]
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from patterns_in(inside)


def is_pattern_of_re(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            re.compile(text)
        except (re.error, RecursionError):
            return False
        return True
