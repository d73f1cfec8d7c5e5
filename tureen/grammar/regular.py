"""Questions about regular languages, and their finite automata.

An expression here is a tree without calls. Every function raises GrammarError when a tree has a call, is nested too
deep or takes too much work.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tureen.grammar.alphabet import Alphabet, Ranges, merged
from tureen.grammar.derivatives import Derivatives
from tureen.grammar.elimination import Elimination
from tureen.grammar.expression import (
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Not,
    Repeat,
    Terminal,
    Text,
)
from tureen.grammar.minimal import minimal

MAX_STATES = 20_000
MAX_NODES = 20_000


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton that starts in state 0. Every state is reachable and can reach an accepting one.

    The empty language has one state, which does not accept, and no moves.
    """

    moves: tuple[tuple[tuple[int, int, int], ...], ...]  # by state: first and last code point and target, sorted
    accepting: tuple[bool, ...]


def automaton(expression: Expression, max_states: int = MAX_STATES) -> Automaton:
    """Returns the automaton of an expression; minimal unless it is very large.

    Raises GrammarError when it takes more than `max_states` states before it is made small.
    """
    terms = Derivatives(expression)
    states, by_atom = _explored(terms, terms.term(expression), max_states)
    accepting = [terms.terms.nullable[term] for term in states]
    live = _live(by_atom, accepting)
    if 0 not in live:
        return Automaton(((),), (False,))
    by_atom = [{atom: target for atom, target in moves.items() if target in live} for moves in by_atom]
    return _numbered(terms.alphabet, by_atom, minimal(by_atom, accepting, live), accepting)


def _explored(terms: Derivatives, start: int, max_states: int) -> tuple[list[int], list[dict[int, int]]]:
    """The terms that are reached, the start first, and from each the state by atom."""
    states, numbers, by_atom = [start], {start: 0}, []
    for term in states:  # grows
        for target in terms.targets(term):
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
        if len(states) > max_states:
            raise GrammarError(f"the expression is too large: its automaton takes more than {max_states} states")
        by_atom.append({atom: numbers[target] for atom, target in terms.by_atom(term)})
    return states, by_atom


def _live(by_atom: list[dict[int, int]], accepting: list[bool]) -> set[int]:
    """The states from which an accepting one is reached."""
    sources: list[list[int]] = [[] for _ in by_atom]
    for state, moves in enumerate(by_atom):
        for target in set(moves.values()):
            sources[target].append(state)
    waiting = [state for state, accepts_here in enumerate(accepting) if accepts_here]
    live = set(waiting)
    while waiting:
        fresh = [source for source in sources[waiting.pop()] if source not in live]
        live.update(fresh)
        waiting += fresh
    return live


def _numbered(
    alphabet: Alphabet, by_atom: list[dict[int, int]], block_of: dict[int, int], accepting: list[bool]
) -> Automaton:
    """One state for each block of equal states, in the order they are reached."""
    numbers, members = {block_of[0]: 0}, [0]
    some_member = {block: state for state, block in block_of.items()}
    moves = []
    for member in members:  # grows
        by_target: dict[int, list[int]] = {}
        for atom, target in by_atom[member].items():
            by_target.setdefault(block_of[target], []).append(atom)
        spans: list[tuple[int, int, int]] = []
        for block, atoms in sorted(by_target.items(), key=lambda item: min(item[1])):
            if block not in numbers:
                numbers[block] = len(members)
                members.append(some_member[block])
            spans += [(first, last, numbers[block]) for atom in atoms for first, last in alphabet.atoms[atom]]
        moves.append(_joined(spans))
    return Automaton(tuple(moves), tuple(accepting[member] for member in members))


def _joined(moves: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Sorted, neighbours with the same target as one."""
    joined: list[tuple[int, int, int]] = []
    for first, last, target in sorted(moves):
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == target:
            joined[-1] = (joined[-1][0], last, target)
        else:
            joined.append((first, last, target))
    return tuple(joined)


def accepts(machine: Automaton, text: str) -> bool:
    """Whether the automaton accepts the whole text."""
    state = 0
    for char in text:
        moves = machine.moves[state]
        at = bisect_right(moves, ord(char), key=lambda move: move[0]) - 1
        if at < 0 or moves[at][1] < ord(char):
            return False
        state = moves[at][2]
    return machine.accepting[state]


def is_empty(expression: Expression) -> bool:
    """Whether it matches nothing."""
    known = _emptiness(expression)
    if known is not None:
        return known
    terms = Derivatives(expression)
    return terms.is_empty(terms.term(expression))


def is_plainly_matched(expression: Expression) -> bool:
    """Returns True only where a look at its parts tells that it matches something."""
    return _emptiness(expression) is False


def _emptiness(expression: Expression, depth: int = 50) -> bool | None:
    """Whether it matches nothing, as far as a look at its parts, so deep, tells; None where it does not."""
    match expression:
        case Text() | Repeat(_, 0):
            return False
        case Chars(ranges):
            return not ranges
        case Repeat(item) | Terminal(item) if depth:
            return _emptiness(item, depth - 1)
        case Chain(items) | Choice(items) if depth:
            inside = {_emptiness(item, depth - 1) for item in items}
            decides = isinstance(expression, Chain)  # an empty part empties a chain, a part that is not fills a choice
            return decides if decides in inside else None if None in inside else not decides
    return None


def intersects(first: Expression, second: Expression) -> bool:
    """Whether some string is matched by both."""
    return not is_empty(Both(first, second))


def includes(first: Expression, second: Expression) -> bool:
    """Whether the first matches every string that the second matches."""
    return is_empty(Both(second, Not(first)))


def first_chars(expression: Expression) -> Chars:
    """Returns the characters that a match can begin with."""
    terms = Derivatives(expression)
    empty: dict[int, bool] = {}
    atoms = []
    for atom, target in terms.by_atom(terms.term(expression)):
        if target not in empty:
            empty[target] = terms.is_empty(target)
        if not empty[target]:
            atoms.append(atom)
    return Chars(merged(span for atom in atoms for span in terms.alphabet.atoms[atom]))


def continuations(expression: Expression, max_states: int = MAX_STATES) -> Chars:
    """Returns the characters with which a match can go on to a longer one."""
    machine = automaton(expression, max_states)
    ends = (moves for moves, accepting in zip(machine.moves, machine.accepting, strict=True) if accepting)
    return Chars(merged((first, last) for moves in ends for first, last, _ in moves))


def is_finite(expression: Expression) -> bool:
    """Whether it matches only finitely many strings."""
    return _topological(automaton(expression)) is not None


def strings_of(expression: Expression, limit: int) -> list[str] | None:
    """Returns all strings it matches, shorter ones first, else by code point; None if there are more than `limit`."""
    machine = automaton(expression)
    order = _topological(machine)
    if order is None or _count(machine, order) > limit:
        return None
    texts, here = [], [("", 0)]
    while here:
        texts += [text for text, state in here if machine.accepting[state]]
        here = [
            (text + chr(point), target)
            for text, state in here
            for first, last, target in machine.moves[state]
            for point in range(first, last + 1)
        ]
    return texts


def _topological(machine: Automaton) -> list[int] | None:
    """The states, each before those it leads to; None when there is a cycle."""
    before = [0] * len(machine.moves)
    for moves in machine.moves:
        for _, _, target in moves:
            before[target] += 1
    order = [state for state, count in enumerate(before) if not count]
    for state in order:  # grows
        for _, _, target in machine.moves[state]:
            before[target] -= 1
            if not before[target]:
                order.append(target)
    return order if len(order) == len(machine.moves) else None


def _count(machine: Automaton, order: list[int]) -> int:
    """How many strings an automaton without cycles accepts."""
    counts = [0] * len(order)
    for state in reversed(order):
        onward = sum((last - first + 1) * counts[target] for first, last, target in machine.moves[state])
        counts[state] = onward + machine.accepting[state]
    return counts[0]


def expression_of(machine: Automaton, max_nodes: int = MAX_NODES) -> Expression:
    """Returns an expression of the same language without Both and Not.

    Raises GrammarError when it takes more than `max_nodes` nodes or is nested too deep.
    """
    accepting = [state for state, accepts_here in enumerate(machine.accepting) if accepts_here]
    if not accepting:
        return NOTHING
    moves = [_by_target(machine, state) for state in range(len(machine.moves))]
    return Elimination(moves, accepting, max_nodes).expression()


def _by_target(machine: Automaton, state: int) -> dict[int, Ranges]:
    """The characters that lead to each next state."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for first, last, target in machine.moves[state]:
        spans.setdefault(target, []).append((first, last))
    return {target: tuple(ranges) for target, ranges in spans.items()}
