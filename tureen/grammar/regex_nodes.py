"""Patterns as trees, in which assertions (anchors, word boundaries, lookaheads) stand where they were written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from tureen.grammar.alphabet import Ranges, merged
from tureen.grammar.char_sets import NEWLINE, complement, intersection
from tureen.grammar.expression import EMPTY, NOTHING, Chain, Chars, Choice, Expression, Repeat, Text
from tureen.grammar.transitions import chain, chars, either, is_nullable, matches_char

MarkKind: TypeAlias = Literal["start", "line start", "end", "final", "line end", "boundary", "no boundary"]


class Mark(msgspec.Struct, frozen=True):
    """An assertion about a place; "final" is the end or before the newline that ends the text."""

    kind: MarkKind
    word: Ranges = ()  # for boundaries


class Look(msgspec.Struct, frozen=True):
    """Asserts that the text that follows begins with `item`, or does not."""

    item: Node
    negative: bool


class Behind(msgspec.Struct, frozen=True):
    """Asserts that the text that came before ends with `item`, or does not."""

    item: Node
    negative: bool


class Concatenation(msgspec.Struct, frozen=True):
    """One after the other, assertions among them."""

    items: tuple[Node, ...]


class Alternatives(msgspec.Struct, frozen=True):
    """Any of these, assertions among them."""

    items: tuple[Node, ...]


class Times(msgspec.Struct, frozen=True):
    """A repeat of something that holds assertions."""

    item: Node
    least: int
    most: int | None

    @property
    def is_simple(self) -> bool:
        """Returns whether the item holds "start", "end" and "final" marks only, and always matches a character."""
        kinds, whole = marks(self.item), unmarked(self.item)
        is_empty = is_nullable(whole) or ("final" in kinds and matches_char(whole, "\n"))
        return kinds <= {"start", "end", "final"} and not is_empty


class Guarded(msgspec.Struct, frozen=True):
    """A repeat of one character, each where the lookahead holds, which asks nothing about what came before."""

    look: Look
    item: Expression
    least: int
    most: int | None


Node: TypeAlias = Expression | Mark | Look | Behind | Concatenation | Alternatives | Times | Guarded
ASSERTING = (Mark, Look, Behind, Concatenation, Alternatives, Times, Guarded)


def sequence(items: list[Node]) -> Node:
    """Joins nodes one after the other; neighbouring texts become one, and a lookahead at one character is done with."""
    joined: list[Node] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + item.text)
        elif isinstance(last, Look) and (narrowed := _narrowed(last, item)):
            joined[-1] = narrowed
        elif item != EMPTY:
            joined.append(item)
    pure = [item for item in joined if not isinstance(item, ASSERTING)]
    if len(pure) == len(joined):
        return chain(pure)
    return Concatenation(tuple(joined)) if len(joined) > 1 else joined[0]


def _narrowed(look: Look, item: Node) -> Expression | None:
    """The characters that both are about, where both are about one."""
    seen, own = char_set(look.item), char_set(item)
    if seen is None or own is None:
        return None
    return chars(intersection(own, complement(seen) if look.negative else seen))


def char_set(node: Node) -> Ranges | None:
    """Returns the characters it matches, if it matches only single ones."""
    match node:
        case Chars(ranges):
            return ranges
        case Text(text) if len(text) == 1:
            return ((ord(text), ord(text)),)
        case Choice(items):
            sets = [char_set(item) for item in items]
            return merged(span for part in sets if part for span in part) if None not in sets else None
    return None


def alternatives(items: list[Node]) -> Node:
    """Returns any of the nodes."""
    pure = [item for item in items if not isinstance(item, ASSERTING)]
    if len(pure) == len(items):
        return either(pure)
    return Alternatives(tuple(items)) if len(items) > 1 else items[0]


def without(node: Node, kinds: tuple[MarkKind, ...]) -> Node:
    """Returns the node as it is where these marks never hold."""
    match node:
        case Mark(kind):
            return NOTHING if kind in kinds else node
        case Concatenation(items):
            return sequence([without(item, kinds) for item in items])
        case Alternatives(items):
            return alternatives([without(item, kinds) for item in items])
        case Times(item, least, most):
            inner = without(item, kinds)
            return Times(inner, least, most) if isinstance(inner, ASSERTING) else Repeat(inner, least, most)
    return node


def unmarked(node: Node) -> Expression:
    """Returns at least what the node can match, as if every mark and lookahead held."""
    match node:
        case Mark() | Look() | Behind():
            return EMPTY
        case Concatenation(items):
            return chain(unmarked(item) for item in items)
        case Alternatives(items):
            return either(unmarked(item) for item in items)
        case Times(item, least, most) | Guarded(_, item, least, most):
            return Repeat(unmarked(item), least, most)
    return node


def marks(node: Node) -> set[str]:
    """Returns the kinds of the assertions in it."""
    match node:
        case Mark(kind):
            return {kind}
        case Look() | Guarded():
            return {"lookahead"}
        case Behind():
            return {"lookbehind"}
        case Concatenation(items) | Alternatives(items):
            return {kind for item in items for kind in marks(item)}
        case Times(item):
            return marks(item)
    return set()


def written(node: Node) -> int:
    """Counts about how many characters a node has with all counted repeats written out."""
    match node:
        case Text(text):
            return len(text)
        case Chain(items) | Choice(items) | Concatenation(items) | Alternatives(items):
            return sum(written(item) for item in items)
        case Repeat(item, least, most) | Times(item, least, most) | Guarded(_, item, least, most):
            return written(item) * max(least if most is None else most, 1)
        case Look(item) | Behind(item):
            return written(item)
    return 1


def asked(items: tuple[Node, ...]) -> Iterator[Ranges]:
    """Yields the sets of which the assertions at the beginning of these ask whether the character before is in them."""
    for item in items:
        match item:
            case Mark(kind, word):
                if kind in ("start", "line start"):
                    yield NEWLINE if kind == "line start" else ()
                elif word:
                    yield word
            case Concatenation(parts):
                yield from asked(parts)
            case Alternatives(parts):
                for part in parts:
                    yield from asked((part,))
            case Look(inner, _) | Times(inner):
                yield from asked((inner,))
            case _ if not is_nullable(unmarked(item)):
                return
