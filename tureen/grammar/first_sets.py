"""The first and last characters of strings tell most expressions apart that have none in common, without their
automata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tureen.grammar.expression import Both, Chain, Chars, Choice, Expression, Not, Repeat, Terminal, Text
from tureen.grammar.remembered import Remembered

HEAD_CHARS = 6  # that are looked at, from the beginning or from the end
OTHER = 128  # the bit of all characters that are not ASCII


class FirstChars(NamedTuple):
    """The strings of an expression begin with these, though not all of these need occur. Of strings that are looked at
    backwards these are the last ones."""

    chars: tuple[int, ...]  # by position: the characters that may stand there, one bit each
    least: int  # characters; more than HEAD_CHARS are not counted
    most: int


OF_ANYTHING = FirstChars(((2 << OTHER) - 1,) * HEAD_CHARS, 0, HEAD_CHARS)
OF_NOTHING = FirstChars((), HEAD_CHARS, 0)

_heads: Remembered[FirstChars] = Remembered()


def are_apart(first: Expression, second: Expression) -> bool:
    """Returns True only where the first or the last characters tell that no string is matched by both."""
    return any(_differ(_head(first, backwards), _head(second, backwards)) for backwards in (False, True))


def _differ(ours: FirstChars, theirs: FirstChars) -> bool:
    least = max(ours.least, theirs.least)
    if least > min(ours.most, theirs.most):
        return True
    return any(not our & their for our, their in zip(ours.chars[:least], theirs.chars, strict=False))


def _head(expression: Expression, backwards: bool) -> FirstChars:
    """The head of an expression, which is mostly asked for again."""
    if type(expression) in (Text, Chars):
        return _head_of(expression, backwards)
    return _heads.get(expression, lambda: _head_of(expression, backwards), backwards)


def _head_of(node: Expression, backwards: bool) -> FirstChars:
    match node:
        case Text(text):
            chars = tuple([1 << min(ord(char), OTHER) for char in (text[::-1] if backwards else text)[:HEAD_CHARS]])
            return FirstChars(chars, len(chars), len(chars))
        case Chars(ranges):
            return FirstChars((_bits(ranges),), 1, 1) if ranges else OF_NOTHING
        case Chain(items):
            return _in_turn(_head(item, backwards) for item in (reversed(items) if backwards else items))
        case Choice(items):
            if items and all(type(item) is Text for item in items):
                return _of_texts([item.text for item in items], backwards)  # type: ignore[union-attr]
            return _any_of([_head(item, backwards) for item in items])
        case Repeat(item, least, most):
            head = _head(item, backwards)
            times = HEAD_CHARS if most is None else min(most, HEAD_CHARS)
            return _in_turn([head] * min(least, times) + [head._replace(least=0)] * (times - min(least, times)))
        case Both(first, second):
            return _head_of(second if isinstance(first, Not) else first, backwards)
        case Terminal(item):
            return _head_of(item, backwards)
    return OF_ANYTHING


def _in_turn(heads: Iterable[FirstChars]) -> FirstChars:
    """The head of strings one after the other."""
    chars = [0] * HEAD_CHARS
    starts = {0}  # where the next one may begin
    for head in heads:
        for start in starts:
            for at, bits in enumerate(head.chars[: HEAD_CHARS - start], start):
                chars[at] |= bits
        starts = {min(start + size, HEAD_CHARS) for start in starts for size in range(head.least, head.most + 1)}
        if not starts:
            return OF_NOTHING
        if min(starts) == HEAD_CHARS:
            break
    return FirstChars(tuple(chars), min(starts), max(starts))


def _any_of(heads: Sequence[FirstChars]) -> FirstChars:
    if not heads:
        return OF_NOTHING
    chars = [0] * HEAD_CHARS
    for head in heads:
        for at, bits in enumerate(head.chars):
            chars[at] |= bits
    return FirstChars(tuple(chars), min(head.least for head in heads), max(head.most for head in heads))


def _of_texts(texts: Sequence[str], backwards: bool) -> FirstChars:
    """The same as of a choice, for many single strings."""
    sizes = [len(text) for text in texts]
    chars = []
    for at in range(min(max(sizes), HEAD_CHARS)):
        place = -1 - at if backwards else at
        letters = {text[place] for text, size in zip(texts, sizes, strict=True) if size > at}
        chars.append(_bits([(ord(letter), ord(letter)) for letter in letters]))
    return FirstChars(tuple(chars), min(min(sizes), HEAD_CHARS), min(max(sizes), HEAD_CHARS))


def _bits(ranges: Iterable[tuple[int, int]]) -> int:
    bits = 0
    for first, last in ranges:
        bits |= (2 << min(last, OTHER)) - (1 << min(first, OTHER))
    return bits
