"""Derivatives of regular expression trees.

Brzozowski, "Derivatives of Regular Expressions" (1964); by character classes as in Owens, Reppy and Turon,
"Regular-expression derivatives re-examined" (2009). Both and Not need no construction of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heappop, heappush
from typing import TypeAlias, TypeVar

from tureen.grammar.alphabet import alphabet_of
from tureen.grammar.expression import (
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    FreeText,
    GrammarError,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.terms import (
    ANYTHING,
    BOTH,
    CHAIN,
    CHOICE,
    EMPTY,
    NOT,
    NOTHING,
    REPEAT,
    SET,
    UNBOUNDED,
    WORD,
    WORD_CHARS,
    TermTable,
)

MAX_DEPTH = 200  # of an expression tree; three Python frames a level

T = TypeVar("T", bound=Hashable)
Moves: TypeAlias = tuple[dict[int, int], int]
"""The derivative by each atom: those of its own, and the one by every other atom."""


def _parts(node: Expression) -> tuple[Expression, ...]:
    match node:
        case Chain(items) | Choice(items):
            return items
        case Both(first, second):
            return first, second
        case Repeat(item) | Not(item) | Terminal(item) | FreeText(item):
            return (item,)
    return ()


class Derivatives:
    """Terms of some expressions, and what follows each character. Raises GrammarError where `TermTable` does."""

    def __init__(self, *expressions: Expression) -> None:
        self.alphabet = alphabet_of(expressions)
        self.terms = TermTable(self.alphabet)
        self._expressions = expressions  # kept, as `_known` is by id
        self._known: dict[int, int] = {}
        self._moves: dict[int, Moves] = {}

    def term(self, expression: Expression) -> int:
        """Returns the term of one of these trees. Raises GrammarError when it is not regular or deeper than
        MAX_DEPTH."""
        return self._term(expression, MAX_DEPTH)

    def _term(self, node: Expression, depth: int) -> int:
        if not depth:
            raise GrammarError(f"the expression is nested too deep: at most {MAX_DEPTH} levels")
        if id(node) not in self._known:
            parts = [self._term(part, depth - 1) for part in _parts(node)]
            self._known[id(node)] = self._of_parts(node, parts)
        return self._known[id(node)]

    def _of_parts(self, node: Expression, parts: list[int]) -> int:
        match node:
            case Text(text):
                return self._text(text)
            case Chars(ranges):
                return self.terms.one_of(self.alphabet.by_ranges[ranges])
            case Repeat(_, least, most):
                return self.terms.repeat(parts[0], least, UNBOUNDED if most is None else most)
            case RuleCall(name):
                raise GrammarError(f"only regular expressions can be compared or negated, and rule {name} is none")
        return self._joined(node, parts)

    def _joined(self, node: Chain | Choice | Both | Not | Terminal | FreeText, parts: list[int]) -> int:
        match node:
            case Chain():
                return self.terms.sequence(parts)
            case Choice():
                return self.terms.choice(parts)
            case Both():
                return self.terms.both(parts)
            case Not():
                return self.terms.complement(parts[0])
            case Terminal() | FreeText():
                return parts[0]

    def _text(self, text: str) -> int:
        if any(char not in self.alphabet.by_char for char in text):
            return NOTHING  # a surrogate
        pieces = [text[at : at + WORD_CHARS] for at in range(0, len(text), WORD_CHARS)]
        return self.terms.sequence([self.terms.word(piece) for piece in pieces])

    def moves(self, term: int) -> Moves:
        """Returns the derivatives of a term."""
        known = self._moves.get(term)
        if known is None:
            known = self._moves[term] = self._derived(term)
        return known

    def _derived(self, term: int) -> Moves:
        key = self.terms.keys[term]
        if key[0] == WORD:
            if term == EMPTY:
                return {}, NOTHING
            text = self.terms.words[key[1]]
            return {self.alphabet.by_char[text[0]]: self.terms.word(text[1:])}, NOTHING
        if key[0] == SET:
            return self._by_set(self.terms.sets[key[1]])
        if key[0] == REPEAT:
            fewer = key[3] if key[3] == UNBOUNDED else key[3] - 1
            return self._then(self.moves(key[1]), self.terms.repeat(key[1], max(key[2] - 1, 0), fewer))
        if key[0] == NOT:
            own, other = self.moves(key[1])
            return _each_once(own, self.terms.complement), self.terms.complement(other)
        if key[0] == CHOICE:
            return self._union([self.moves(part) for part in key[1:]])
        if key[0] == BOTH:
            return self._intersection([self.moves(part) for part in key[1:]])
        return self._by_chain(term)

    def _by_set(self, atoms: frozenset[int]) -> Moves:
        count = len(self.alphabet.atoms)
        if 2 * len(atoms) <= count:
            return dict.fromkeys(atoms, EMPTY), NOTHING
        return dict.fromkeys(set(range(count)) - atoms, NOTHING), EMPTY

    def _by_chain(self, term: int) -> Moves:
        parts = []
        while self.terms.keys[term][0] == CHAIN:
            _, head, rest = self.terms.keys[term]
            parts.append(self._then(self.moves(head), rest))
            if not self.terms.nullable[head]:
                return self._union(parts)
            term = rest
        return self._union([*parts, self.moves(term)])

    def _then(self, moves: Moves, rest: int) -> Moves:
        own, other = moves
        self.terms.spend(len(own))
        return _each_once(own, lambda target: self.terms.chain(target, rest)), self.terms.chain(other, rest)

    def _union(self, parts: list[Moves]) -> Moves:
        if len(parts) == 1:
            return parts[0]
        by_atom: dict[int, list[int]] = {}
        for own, _ in parts:
            for atom, target in own.items():
                by_atom.setdefault(atom, []).append(target)
        for own, other in parts:
            if other != NOTHING:
                for atom, targets in by_atom.items():
                    if atom not in own:
                        targets.append(other)
        self.terms.spend(len(by_atom))
        by_targets = {atom: tuple(targets) for atom, targets in by_atom.items()}
        return _each_once(by_targets, self.terms.choice), self.terms.choice(o for _, o in parts)

    def _intersection(self, parts: list[Moves]) -> Moves:
        atoms = {atom for own, _ in parts for atom in own}
        by_targets = {atom: tuple([own.get(atom, other) for own, other in parts]) for atom in atoms}
        num_shared = len(atoms) - len(set(by_targets.values()))
        # Count shared results too, so that the limit refuses the same patterns as before.
        self.terms.spend((len(atoms) + num_shared) * len(parts))
        return _each_once(by_targets, self.terms.both), self.terms.both(other for _, other in parts)

    def targets(self, term: int) -> list[int]:
        """Returns the different derivatives but NOTHING."""
        own, other = self.moves(term)
        different = dict.fromkeys(own.values())
        if len(own) < len(self.alphabet.atoms):
            different[other] = None
        different.pop(NOTHING, None)
        return list(different)

    def by_atom(self, term: int) -> Iterator[tuple[int, int]]:
        """Yields the derivative by each atom but NOTHING."""
        own, other = self.moves(term)
        if other == NOTHING:
            return ((atom, target) for atom, target in own.items() if target != NOTHING)
        by_atom = ((atom, own.get(atom, other)) for atom in range(len(self.alphabet.atoms)))
        return ((atom, target) for atom, target in by_atom if target != NOTHING)

    def is_empty(self, term: int) -> bool:
        """Returns whether nothing is matched."""
        seen, waiting = {term}, [(0, 0, term)]
        while (
            waiting
        ):  # what can be short comes first: most expressions match something, and no other path is looked at
            here = heappop(waiting)[2]
            if self.terms.nullable[here] or (self.terms.plain[here] and here != NOTHING):
                return False
            fresh = [target for target in self.targets(here) if target not in seen]
            for target in fresh:
                heappush(waiting, (self.terms.lengths[target][0], len(seen), target))
                seen.add(target)
        return True


def _each_once(by_atom: Mapping[int, T], make: Callable[[T], int]) -> dict[int, int]:
    """Returns what is made of the value of each atom. Equal values are made once: many atoms share one."""
    results = {value: make(value) for value in dict.fromkeys(by_atom.values())}
    return {atom: results[value] for atom, value in by_atom.items()}


class Matcher:
    """Tells which strings an expression matches. What it finds out on the way serves the next string."""

    def __init__(self, expression: Expression) -> None:
        """Raises GrammarError as `Derivatives.term` does."""
        self._machine = Derivatives(expression)
        self._start = self._machine.term(expression)
        spans = sorted(
            (first, last, atom) for atom, ranges in enumerate(self._machine.alphabet.atoms) for first, last in ranges
        )
        self._firsts = [first for first, _, _ in spans]
        self._atoms = [atom for _, _, atom in spans]
        self._by_char = dict(self._machine.alphabet.by_char)

    def matches(self, text: str) -> bool:
        """Returns whether it matches the whole text, which has no surrogates. Raises GrammarError where that takes too
        much work."""
        by_char, moves = self._by_char, self._machine.moves
        term = self._start
        for char in text:
            if term in (NOTHING, ANYTHING):
                break
            atom = by_char.get(char)
            if atom is None:
                atom = by_char[char] = self._atoms[bisect_right(self._firsts, ord(char)) - 1]
            own, other = moves(term)
            term = own.get(atom, other)
        return self._machine.terms.nullable[term]
