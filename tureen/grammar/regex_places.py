"""Assertions anywhere in a pattern, also in what is repeated, by the places where they were asked.

Each assertion writes a character of its own where it is asked: the pattern then is regular without assertions. That an
assertion holds is a regular property of such a text, too, as it compares what stands before and behind its character.
What is left of the two together, without these characters, are the texts that match. The characters are code points
that Unicode keeps from being any: texts that hold one of them are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from tureen.grammar.alphabet import alphabet_of
from tureen.grammar.char_sets import NEWLINE, complement, intersection
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
    Text,
)
from tureen.grammar.regex_nodes import (
    Alternatives,
    Behind,
    Concatenation,
    Guarded,
    Look,
    Mark,
    Node,
    Times,
    asked,
    marks,
    sequence,
)
from tureen.grammar.regular import automaton, expression_of
from tureen.grammar.transitions import chain, chars, either

PLACES = (0xFDD0, 0xFDEF)
PLACE = Chars((PLACES,))
NO_PLACE = complement((PLACES,))
MAX_PLACES = PLACES[1] - PLACES[0] + 1
MAX_STATES = 3_000
MAX_NODES = 20_000

Language = Callable[[tuple[Node, ...], str], Expression]
Refuse = Callable[[str], NoReturn]


def needs_places(node: Node) -> bool:
    """Returns whether the pattern holds a lookbehind, or repeats what holds more than anchors."""
    match node:
        case Behind():
            return True
        case Times(item):
            return not node.is_simple or needs_places(item)
        case Look(item) | Guarded(Look(item)):
            return needs_places(item)
        case Concatenation(items) | Alternatives(items):
            return any(map(needs_places, items))
    return False


def matched(items: tuple[Node, ...], language: Language, refuse: Refuse, *, boundary_in_empty: bool) -> Expression:
    """Returns the texts that the items match one after the other.

    `language` gives those of a lookaround's items behind a character. `boundary_in_empty`: whether `\\B` holds
    in the empty text. Raises GrammarError where it takes too many states.
    """
    places = _Places(language, refuse, boundary_in_empty=boundary_in_empty)
    asked = chain(places.written(item) for item in items)
    whole = Both(asked, Not(either(places.wrong)))
    try:
        return _without_places(expression_of(automaton(whole, MAX_STATES), MAX_NODES))
    except GrammarError:
        refuse("its assertions are too large together; use fewer or smaller ones")


class _Places:
    """`wrong` are the texts in which an assertion does not hold."""

    def __init__(self, language: Language, refuse: Refuse, *, boundary_in_empty: bool) -> None:
        self._language = language
        self._refuse = refuse
        self._boundary_in_empty = boundary_in_empty
        self._known: dict[Mark | Look | Behind, Expression] = {}
        self.wrong: list[Expression] = []

    def written(self, node: Node) -> Expression:
        """Returns the node with a character for each assertion."""
        match node:
            case Mark() | Look() | Behind():
                return self._asked(node)
            case Concatenation(items):
                return chain(self.written(item) for item in items)
            case Alternatives(items):
                return either(self.written(item) for item in items)
            case Times(item, least, most):
                return Repeat(self.written(item), least, most)
            case Guarded(look, item, least, most):
                return Repeat(self.written(sequence([look, item])), least, most)
        return _without_place_chars(node)

    def _asked(self, node: Mark | Look | Behind) -> Expression:
        if node not in self._known:
            if len(self._known) == MAX_PLACES:
                self._refuse(f"it has too many assertions: at most {MAX_PLACES} different ones")
            place = Text(chr(PLACES[0] + len(self._known)))
            self._known[node] = place
            for before, behind in self._failures(node):
                self.wrong.append(chain((_interspersed(before), place, _interspersed(behind))))
        return self._known[node]

    def _failures(self, node: Mark | Look | Behind) -> Iterator[tuple[Expression, Expression]]:
        """Yields what may stand before and behind a place at which the assertion does not hold."""
        match node:
            case Look(item, negative):
                for before, seen in self._seen(item):
                    yield before, seen if negative else Not(seen)
            case Behind(item, negative):
                if not marks(item) <= {"start", "line start"}:
                    self._refuse("a lookbehind can hold no assertion but ^")
                seen = self._language((ANYTHING, item), "")
                yield seen if negative else Not(seen), ANYTHING
            case Mark():
                yield from self._mark_failures(node)

    def _seen(self, item: Node) -> Iterator[tuple[Expression, Expression]]:
        """Yields what may come before a lookahead, and what it sees then."""
        if _holds_behind(item):
            self._refuse("a lookahead cannot hold a lookbehind")
        sets = set(asked((item,)))
        if not sets:
            yield ANYTHING, self._language((item, ANYTHING), "")
            return
        yield EMPTY, self._language((item, ANYTHING), "")
        for atom in alphabet_of(Chars(ranges) for ranges in sets).atoms:
            yield chain((ANYTHING, Chars(tuple(atom)))), self._language((item, ANYTHING), chr(atom[0][0]))

    def _mark_failures(self, mark: Mark) -> Iterator[tuple[Expression, Expression]]:
        some = Repeat(ANY_CHAR, 1)
        no_break = chars(complement(NEWLINE))
        match mark.kind:
            case "start":
                yield some, ANYTHING
            case "line start":
                yield chain((ANYTHING, no_break)), ANYTHING
            case "end":
                yield ANYTHING, some
            case "final":
                yield ANYTHING, Not(Choice((EMPTY, Text("\n"))))
            case "line end":
                yield ANYTHING, chain((no_break, ANYTHING))
            case kind:
                word, other = chars(mark.word), chars(complement(mark.word))
                before = chain((ANYTHING, word)), Choice((EMPTY, chain((ANYTHING, other))))
                behind = chain((word, ANYTHING)), Choice((EMPTY, chain((other, ANYTHING))))
                are_equal = kind == "boundary"
                yield before[0], behind[0 if are_equal else 1]
                yield before[1], behind[1 if are_equal else 0]
                if not are_equal and not self._boundary_in_empty:
                    yield EMPTY, EMPTY


def _holds_behind(node: Node) -> bool:
    match node:
        case Behind():
            return True
        case Look(item) | Times(item) | Guarded(Look(item)):
            return _holds_behind(item)
        case Concatenation(items) | Alternatives(items):
            return any(map(_holds_behind, items))
    return False


def _without_place_chars(node: Expression) -> Expression:
    match node:
        case Text(text):
            return NOTHING if any(PLACES[0] <= ord(char) <= PLACES[1] for char in text) else node
        case Chars(ranges):
            return chars(intersection(ranges, NO_PLACE))
    return _over_parts(node, _without_place_chars)


def _interspersed(node: Expression) -> Expression:
    """The texts with places anywhere in them."""
    any_places = Repeat(PLACE)
    match node:
        case Repeat(item, 0, None) if item == ANY_CHAR:
            return ANYTHING
        case Text(text):
            return chain((any_places, *(part for char in text for part in (Text(char), any_places))))
        case Chars(ranges):
            return chain((any_places, chars(intersection(ranges, NO_PLACE)), any_places))
        case Repeat(item, 0, most):
            return either((any_places, Repeat(_interspersed(item), 1, most))) if most != 0 else any_places
        case Chain(()):
            return any_places
    return _over_parts(node, _interspersed)


def _without_places(node: Expression) -> Expression:
    match node:
        case Text(text):
            return Text("".join(char for char in text if not PLACES[0] <= ord(char) <= PLACES[1]))
        case Chars(ranges):
            rest = intersection(ranges, NO_PLACE)
            return chars(rest) if rest == ranges else either((EMPTY, chars(rest))) if rest else EMPTY
        case Repeat(item, least, most):
            inner = _without_places(item)
            return EMPTY if inner == EMPTY else Repeat(inner, least, most)
    return _over_parts(node, _without_places)


def _over_parts(node: Expression, change: Callable[[Expression], Expression]) -> Expression:
    match node:
        case Chain(items):
            return chain(change(item) for item in items)
        case Choice(items):
            return either(change(item) for item in items)
        case Repeat(item, least, most):
            return Repeat(change(item), least, most)
        case Both(first, second):
            return Both(change(first), change(second))
        case Not(item):
            return Not(change(item))
    return node
