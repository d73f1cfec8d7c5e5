"""Regular expressions in Python's or ECMA-262's syntax as expression trees; assertions are resolved here.

What follows an assertion up to the end of the text is one language, and what came before it is known by its last
character. So a lookahead is an intersection with what follows, an anchor or a word boundary keeps the part of it that
begins as the assertion wants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NoReturn

from tureen.errors import echo
from tureen.grammar.alphabet import alphabet_of
from tureen.grammar.char_sets import NEWLINE, complement
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
    SchemaError,
    Text,
)
from tureen.grammar.regex_classes import Flavour
from tureen.grammar.regex_form import fault_in_ecma, is_of_python
from tureen.grammar.regex_nodes import (
    ASSERTING,
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
    without,
)
from tureen.grammar.regex_places import matched, needs_places
from tureen.grammar.regex_syntax import PatternParser
from tureen.grammar.regular import strings_of
from tureen.grammar.transitions import beginning, chain, either, ending, is_nullable, matches_char

MAX_STEPS = 10_000  # of resolving the assertions of one pattern
MAX_SIZE = 50_000  # of the expression, which repeats what follows an alternative
MAX_ENDINGS = 50  # texts after a repeat with a lookahead
MAX_DEPTH = 100  # assertions, and groups that hold some, one behind the other
NO_BOUNDARY_IN_EMPTY = re.search(r"\B", "") is not None  # whether `\B` of this Python finds the empty text


def parse(pattern: str, *, flavour: Flavour) -> Expression:
    """Returns the texts that match from end to end: `re.fullmatch`, or ECMA-262 with the flag u.

    Raises SchemaError for what is no pattern, GrammarError for what is not regular or not supported, with the position.
    """
    return Resolver(pattern, flavour).whole((_parsed(pattern, flavour),))


def search(pattern: str, *, flavour: Flavour) -> Expression:
    """Returns the texts in which the pattern is found somewhere, as JSON Schema wants it. Raises what `parse` does."""
    node = _parsed(pattern, flavour)
    branches = list(node.items) if isinstance(node, Alternatives) else [node]
    plain: list[Expression] = [branch for branch in branches if not isinstance(branch, ASSERTING)]
    searched: Node = _least_at(0, _least_at(-1, either(plain)))
    branches = [searched, *(branch for branch in branches if isinstance(branch, ASSERTING))]
    resolver = Resolver(pattern, flavour)
    return either(resolver.whole((ANYTHING, branch, ANYTHING)) for branch in branches)


def _least_at(edge: int, part: Expression) -> Expression:
    """Returns a part with the repeats at one edge (0: the beginning, -1: the end) reduced to their minimum. Searching
    allows any text at the edges, so `a.{1,30}` finds what `a.` finds."""
    match part:
        case Repeat(item, least):
            return EMPTY if least == 0 else Repeat(item, least, least)
        case Choice(items):
            return Choice(tuple(_least_at(edge, item) for item in items))
        case Chain(items) if items:
            outer, rest = _least_at(edge, items[edge]), items[1:] if edge == 0 else items[:-1]
            if outer == EMPTY:
                return _least_at(edge, Chain(rest))
            return Chain((outer, *rest) if edge == 0 else (*rest, outer))
    return part


def check_form(pattern: str, *, flavour: Flavour) -> None:
    """Raises SchemaError for a malformed pattern, whether the rest of it is supported or not."""
    try:
        _parsed(pattern, flavour)
    except SchemaError:
        raise
    except GrammarError:
        fault = fault_in_ecma(pattern)
        if fault is not None and not is_of_python(pattern):
            raise SchemaError(f"pattern {echo(pattern)}: {fault[0]} (position {fault[1]})") from None


@lru_cache(1024)
def _parsed(pattern: str, flavour: Flavour) -> Node:
    return PatternParser(pattern, flavour).pattern()


class UnresolvedError(Exception):
    """The assertions of a pattern cannot be resolved from its end to its beginning."""


class Resolver:
    """Turns nodes with assertions into expressions.

    What came before is given as its last character or any other the assertions cannot tell from it; "" = nothing came.
    """

    def __init__(self, pattern: str, flavour: Flavour) -> None:
        self._pattern = pattern
        self._depth = 0
        self._sizes: dict[int, int] = {}  # by id of what is kept in `_known`
        self._known: dict[tuple[tuple[int, ...], str], tuple[tuple[Node, ...], Expression]] = {}
        self._empty_has_no_boundary = flavour == "ecma" or NO_BOUNDARY_IN_EMPTY

    def _refuse(self, what: str) -> NoReturn:
        raise GrammarError(f"pattern {echo(self._pattern)}: {what}")

    def whole(self, items: tuple[Node, ...], before: str = "") -> Expression:
        """Returns the texts, up to the end, that these match one after the other."""
        if not any(map(needs_places, items)):
            try:
                return self.language(items, before)
            except UnresolvedError:
                pass
        first, behind = _final_behind(items)
        if behind is not None and not before:  # it has seen the whole text
            seen = self.whole((ANYTHING, behind.item))
            return _both(self.whole(first), Not(seen) if behind.negative else seen)
        if before:
            self._refuse("a lookahead that asks what came before it cannot repeat what holds assertions")
        return matched(items, self.whole, self._refuse, boundary_in_empty=self._empty_has_no_boundary)

    def language(self, items: tuple[Node, ...], before: str) -> Expression:
        """Returns the texts, up to the end, that these match one after the other."""
        key = (tuple(map(id, items)), before)
        if key not in self._known:
            self._depth += 1
            levels = self._depth + sum(isinstance(item, ASSERTING) for item in items)  # at least
            if levels > MAX_DEPTH or len(self._known) > MAX_STEPS:
                self._refuse("it has too many assertions; use fewer of ^ $ \\b and lookaheads")
            self._known[key] = items, self._resolved(items, before)  # the items are kept, as ids are used again
            self._depth -= 1
            if self._size(self._known[key][1]) > MAX_SIZE:
                self._refuse(f"it is too large without its assertions: more than {MAX_SIZE} parts")
        return self._known[key][1]

    def _size(self, node: Expression) -> int:
        """How many parts it has as a tree; a part of what was resolved before is not gone through again."""
        if id(node) not in self._sizes:
            match node:
                case Chain(items) | Choice(items):
                    size = sum(self._size(item) for item in items)
                case Both(first, second):
                    size = self._size(first) + self._size(second)
                case Repeat(item) | Not(item):
                    size = self._size(item)
                case _:
                    size = 1
            self._sizes[id(node)] = size + 1
        return self._sizes[id(node)]

    def _resolved(self, items: tuple[Node, ...], before: str) -> Expression:
        plain: list[Expression] = []
        for item in items:
            if isinstance(item, ASSERTING):
                break
            plain.append(item)
        else:
            return chain(plain)
        if plain:
            return self._after(chain(plain), items[len(plain) :], before)
        rest = items[1:]
        match items[0]:
            case Concatenation(parts):
                return self.language((*parts, *rest), before)
            case Alternatives(parts):
                return either(self.language((part, *rest), before) for part in parts)
            case Times() as times:
                return either(self.language((*option, *rest), before) for option in _unrolled(times))
            case Look() as look:
                return _both(self.language(rest, before), self._seen(look, before))
            case Guarded() as guarded:
                return self._guarded(guarded, rest)
            case Mark() as mark:
                return self._at_mark(mark, rest, before)
        raise TypeError(f"no such node: {items[0]!r}")

    def _after(self, first: Expression, rest: tuple[Node, ...], before: str) -> Expression:
        """`first`, then what its last character allows of the rest."""
        sets = set(asked(rest))
        if not sets:
            return chain((first, self.language(rest, before)))
        following: dict[Expression, list[tuple[int, int]]] = {}
        for atom in alphabet_of(Chars(ranges) for ranges in sets).atoms:
            following.setdefault(self.language(rest, chr(atom[0][0])), []).extend(atom)
        at_once = self.language(rest, before) if is_nullable(first) else NOTHING
        if list(following) == [at_once] or (len(following) == 1 and not is_nullable(first)):
            return chain((first, next(iter(following))))
        parts = [at_once]
        for expression, ranges in following.items():
            parts.append(chain((ending(first, tuple(sorted(ranges))), expression)))
        return either(part for part in parts if part != NOTHING)

    def _seen(self, look: Look, before: str) -> Expression:
        """The texts, up to the end, of which the lookahead holds."""
        seen = self.language((look.item, ANYTHING), before)
        return Not(seen) if look.negative else seen

    def _guarded(self, guarded: Guarded, rest: tuple[Node, ...]) -> Expression:
        """Before a fixed text: the lookahead holds at each place that is farther from the end than it is long."""
        texts = None if set(asked(rest)) else strings_of(self.language(rest, ""), MAX_ENDINGS)
        if texts is None:
            raise UnresolvedError
        options = []
        for text in texts:
            fails = Both(Not(self._seen(guarded.look, "")), Repeat(ANY_CHAR, len(text) + 1))
            run = chain((Repeat(guarded.item, guarded.least, guarded.most), Text(text)))
            options.append(Both(run, Not(chain((ANYTHING, fails)))))
        return either(options)

    def _at_mark(self, mark: Mark, rest: tuple[Node, ...], before: str) -> Expression:
        if mark.kind == "start" or mark.kind == "line start":
            holds = before in ("", "\n") if mark.kind == "line start" else not before
            return self.language(rest, before) if holds else NOTHING
        following = self.language(rest, before)
        at_end = EMPTY if is_nullable(following) else NOTHING
        if mark.kind == "end":
            return at_end
        if mark.kind == "final":
            return either((at_end, Text("\n"))) if matches_char(following, "\n") else at_end
        if mark.kind == "line end":
            return either((at_end, beginning(following, NEWLINE)))
        before_word = bool(before) and any(first <= ord(before) <= last for first, last in mark.word)
        if before_word == (mark.kind == "no boundary"):
            return beginning(following, mark.word)
        if mark.kind == "no boundary" and not before and not self._empty_has_no_boundary:
            at_end = NOTHING
        return either((at_end, beginning(following, complement(mark.word))))


def _final_behind(items: tuple[Node, ...]) -> tuple[tuple[Node, ...], Behind | None]:
    """Returns what comes before a lookbehind at the end, and the lookbehind if it asks of ^ at most."""
    flat: list[Node] = []
    waiting = list(reversed(items))
    while waiting:
        item = waiting.pop()
        if isinstance(item, Concatenation):
            waiting.extend(reversed(item.items))
        else:
            flat.append(item)
    if len(flat) > 1 and flat[-1] == ANYTHING and flat[-2] == Mark("end"):
        flat.pop()
    while flat and flat[-1] in (Mark("end"), Mark("final")):
        flat.pop()
    last = flat[-1] if flat else None
    if isinstance(last, Behind) and marks(last.item) <= {"start", "line start"}:
        return tuple(flat[:-1]), last
    return items, None


def _unrolled(times: Times) -> Iterator[tuple[Node, ...]]:
    """The repeat as alternatives: no item in which a mark holds is repeated. Each item matches some character."""
    item, least, most = times.item, times.least, times.most
    if least == 0:
        yield ()
    if least < 2:
        yield (item,)
    inner = without(item, ("start", "end", "final"))
    if not isinstance(inner, ASSERTING):
        between = Repeat(inner, max(least - 2, 0), None if most is None else most - 2)
        yield without(item, ("end", "final")), between, without(item, ("start",))


def _both(first: Expression, second: Expression) -> Expression:
    if NOTHING in (first, second) or second == Not(ANYTHING):
        return NOTHING
    return first if second in (ANYTHING, Not(NOTHING)) else Both(first, second)
