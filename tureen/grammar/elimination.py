"""Expressions for automata, by state elimination.

Brzozowski and McCluskey, "Signal flow graph techniques for sequential circuit state diagrams" (1963). States go in the
order of what it costs, but those whose expressions are nested deep go last: Delgado and Morais, "Approximation to the
smallest regular expression for a given regular language" (2004).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeAlias

from tureen.grammar.alphabet import Ranges, alphabet_of, merged
from tureen.grammar.expression import EMPTY as EMPTY_TEXT
from tureen.grammar.expression import Chain, Chars, Choice, Expression, GrammarError, Repeat, Text
from tureen.grammar.terms import CHAIN, CHOICE, EMPTY, NOTHING, REPEAT, SET, UNBOUNDED, TermTable

DEPTH_STEP = 8  # levels of nesting that count as equally deep
MAX_DEPTH = 100  # of the expression made
MAX_FACTORS = 20  # common items taken out of a choice
WORK_PER_NODE = 20  # nodes of terms joined on the way, for each node that is allowed

Cost: TypeAlias = tuple[int, int, int]


class Elimination:
    """An automaton whose moves are terms; its states are taken away until one move is left."""

    def __init__(self, moves: list[dict[int, Ranges]], accepting: Iterable[int], max_nodes: int) -> None:
        """`moves`: by state and target the characters. The start is state 0; some state accepts."""
        alphabet = alphabet_of(Chars(ranges) for row in moves for ranges in row.values())
        self._terms = TermTable(alphabet)
        self._sizes: dict[int, tuple[int, int]] = {EMPTY: (1, 1)}
        self._max_nodes = max_nodes
        self._work = 0
        self._start, self._end = len(moves), len(moves) + 1
        self._out = [
            {target: self._terms.one_of(alphabet.by_ranges[ranges]) for target, ranges in row.items()} for row in moves
        ]
        self._out += [{0: EMPTY}, {}]
        for state in accepting:
            self._out[state][self._end] = EMPTY
        self._into: list[set[int]] = [set() for _ in self._out]
        for state, row in enumerate(self._out):
            for target in row:
                self._into[target].add(state)

    def expression(self) -> Expression:
        """Returns an expression of the automaton's language. Raises GrammarError when the expression is too large."""
        costs = {state: self._cost(state) for state in range(self._start)}
        queue = [(cost, state) for state, cost in costs.items()]
        heapq.heapify(queue)
        while queue:
            cost, state = heapq.heappop(queue)
            if costs.get(state) != cost:
                continue
            del costs[state]
            for touched in self._eliminate(state):
                if touched in costs:
                    costs[touched] = self._cost(touched)
                    heapq.heappush(queue, (costs[touched], touched))
        return self._expression(self._out[self._start][self._end])

    def _cost(self, state: int) -> Cost:
        """How deep the terms through the state are, how many nodes more there will be, and how many there are."""
        into = [self._size(self._out[source][state]) for source in self._into[state] if source != state]
        out = [self._size(term) for target, term in self._out[state].items() if target != state]
        nodes_in, nodes_out = sum(nodes for nodes, _ in into), sum(nodes for nodes, _ in out)
        loop, loop_depth = self._size(self._out[state].get(state, EMPTY))
        more = nodes_in * (len(out) - 1) + nodes_out * (len(into) - 1) + loop * (len(into) * len(out) - 1)
        self._work += len(into) + len(out)
        return max([loop_depth, *(depth for _, depth in into + out)]) // DEPTH_STEP, more, nodes_in + nodes_out

    def _eliminate(self, state: int) -> set[int]:
        """Take a state away. Returns its neighbours."""
        out, into = self._out[state], self._into[state]
        around = self._terms.repeat(out.pop(state, EMPTY), 0, UNBOUNDED)
        into.discard(state)
        for target in out:
            self._into[target].discard(state)
        for source in into:
            first = self._terms.chain(self._out[source].pop(state), around)
            for target, last in out.items():
                bypass = self._terms.chain(first, last)
                self._out[source][target] = self._either(self._out[source].get(target, NOTHING), bypass, MAX_FACTORS)
                self._into[target].add(source)
                self._check(self._out[source][target])
        self._out[state], self._into[state] = {}, set()
        return into.union(out)

    def _check(self, term: int) -> None:
        nodes, depth = self._size(term)
        self._work += nodes
        if max(nodes, self._work // WORK_PER_NODE) > self._max_nodes or depth > MAX_DEPTH:
            raise GrammarError(
                f"the intersections and complements are too complex: written without them they are more than"
                f" {self._max_nodes} parts or {MAX_DEPTH} levels"
            )

    def _either(self, first: int, second: int, factors: int) -> int:
        """Any of both, what they begin and end with taken out."""
        if NOTHING in (first, second) or not factors:
            return self._terms.choice((first, second))
        (head, rest), (other, other_rest) = self._terms.parted(first), self._terms.parted(second)
        if head == other and EMPTY not in (rest, other_rest):
            return self._terms.chain(head, self._either(rest, other_rest, factors - 1))
        if rest == other_rest != EMPTY:
            return self._terms.chain(self._either(head, other, factors - 1), rest)
        return self._terms.choice((first, second))

    def _size(self, term: int) -> tuple[int, int]:
        """Nodes and levels of the term written as a tree."""
        path = []
        while term not in self._sizes and self._terms.keys[term][0] == CHAIN:
            path.append(term)
            term = self._terms.keys[term][2]
        if term not in self._sizes:
            kind, *parts = self._terms.keys[term]
            inner = [self._size(part) for part in (parts if kind == CHOICE else parts[:1] if kind == REPEAT else ())]
            self._sizes[term] = 1 + sum(nodes for nodes, _ in inner), 1 + max((depth for _, depth in inner), default=0)
        for chain in reversed(path):
            nodes, depth = self._sizes[self._terms.keys[chain][2]]
            own_nodes, own_depth = self._size(self._terms.keys[chain][1])
            self._sizes[chain] = nodes + own_nodes, max(depth, own_depth + 1)
        return self._sizes[term if not path else path[0]]

    def _expression(self, term: int) -> Expression:
        """The term as a tree."""
        kind, *parts = self._terms.keys[term]
        if term == EMPTY:
            return EMPTY_TEXT
        if kind == SET:
            atoms = self._terms.sets[parts[0]]
            ranges = merged(span for atom in atoms for span in self._terms.alphabet.atoms[atom])
            return Text(chr(ranges[0][0])) if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else Chars(ranges)
        if kind == REPEAT:
            return Repeat(self._expression(parts[0]), parts[1], None if parts[2] == UNBOUNDED else parts[2])
        if kind == CHOICE:
            return Choice(tuple(self._expression(part) for part in parts))
        items: list[Expression] = []
        while term != EMPTY:
            head, term = self._terms.parted(term)
            item = self._expression(head)
            last = items[-1] if items else None
            if isinstance(item, Text) and isinstance(last, Text):
                items[-1] = Text(last.text + item.text)
            else:
                items.append(item)
        return Chain(tuple(items)) if len(items) > 1 else items[0]
