"""Free text up to fixed strings, and free text in which they do not occur."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    Both,
    Chain,
    Choice,
    Expression,
    FreeText,
    Not,
    Repeat,
    Terminal,
    Text,
)
from tureen.grammar.rules import SOMETHING, can_be_empty


def any_of(texts: Iterable[str]) -> Expression:
    """Returns exactly one of these strings."""
    items = tuple(Text(text) for text in texts)
    return items[0] if len(items) == 1 else Choice(items)


def up_to(
    ends: Sequence[str], stops: Sequence[str], free: Expression = ANYTHING, never: Sequence[str] = ()
) -> Terminal:
    """Returns a text of `free` and one of `ends`, which is also where the first of `stops` is complete.

    `stops` hold the `ends`. No string of `never` occurs in the whole of it. No such text begins another one.
    """
    later: Expression = Chain((ANYTHING, any_of(stops), SOMETHING))
    if never:
        later = Choice((later, _containing(never)))
    return Terminal(Both(Chain((free, any_of(ends))), Not(later)))


def free_of(strings: Sequence[str], most: int | None = None) -> Expression:
    """Returns any text of at most `most` characters in which none of these strings occurs."""
    text = ANYTHING if most is None else Repeat(ANY_CHAR, 0, most) if most else EMPTY
    if not strings:
        return text
    free = Not(_containing(strings))
    return free if most is None else Both(text, free)


def to_the_end(text: Expression) -> Expression:
    """Returns a regular text after which the output ends: one terminal, as nothing follows, which is never empty."""
    return Choice((EMPTY, Terminal(Both(text, SOMETHING)))) if can_be_empty(text) else Terminal(text)


def endless(free: Expression, *, is_last: bool) -> FreeText:
    """Returns free text without a bound and without a text that ends it. `is_last`: the output ends after it."""
    return FreeText(to_the_end(free) if is_last else free)


def _containing(strings: Sequence[str]) -> Expression:
    return Chain((ANYTHING, any_of(strings), ANYTHING))
