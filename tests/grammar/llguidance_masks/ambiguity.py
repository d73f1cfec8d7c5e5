"""Finds where a greedy lexer without backtracking could be wrong about the end of a terminal.

Sets of terminals are integers, bit i for terminal i; so are sets of first bytes. All of it errs to the safe side:
contexts are not told apart, and of a character only the first byte of its UTF-8 is looked at, as a lexer of bytes must
decide there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tureen.grammar.alphabet import Ranges
from tureen.grammar.expression import Chain, Choice, Expression, GrammarError, Repeat, RuleCall
from tureen.grammar.regular import Automaton, automaton
from tureen.grammar.rules import calls, can_be_empty

ALL_BYTES = (1 << 256) - 1
MAX_STATES = 1_000
MAX_PAIRS = 5_000
"""Pairs of states looked at to compare two terminals; where there are more, they are taken to conflict."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The terminals with which an expression can begin and end, and whether it can be empty."""

    empty: bool
    first: int
    last: int


NONE = Ends(True, 0, 0)


class Ambiguity:
    """A grammar over numbered terminals: an expression and its rules, made of calls of rules and terminals."""

    def __init__(
        self,
        start: Expression,
        rules: Mapping[str, Expression],
        items: Mapping[str, Expression],
        machines: dict[str, Automaton | None],
    ) -> None:
        """`machines` are those of the terminals known by now; the others are added."""
        self._names = list(items)
        for name, item in items.items():
            if name not in machines:
                machines[name] = _machine(item)
        self._machines = [machines[name] for name in items]
        self._starts = [_first_bytes(machine) for machine in self._machines]
        self._rules = rules
        self._follow = [0] * len(items)
        self._of_calls: dict[str, Ends] = {
            name: Ends(can_be_empty(item), 1 << index, 1 << index) for index, (name, item) in enumerate(items.items())
        }
        self._settle()
        self._together = self._allowed_together(self._ends(start).first)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields terminals and those (it may be the same) that go on where the terminal may have ended."""
        starts = self._starts
        for index, name in enumerate(self._names):
            following = 0
            for other in _bits(self._follow[index]):
                following |= starts[other]
            if not following:
                continue
            for other in _bits(self._together[index]):
                if starts[index] & starts[other] and self._going_on(index, other) & following:
                    yield name, self._names[other]

    def _settle(self) -> None:
        """Work out the ends of the rules, and what follows each terminal."""
        callers: dict[str, set[str]] = {name: set() for name in self._rules}
        for name, rule in self._rules.items():
            self._of_calls[name] = Ends(False, 0, 0)
            for called in calls(rule):
                if called in callers:
                    callers[called].add(name)
        queue = dict.fromkeys(reversed(list(self._rules)))  # callers mostly come first
        while queue:
            name = next(iter(queue))
            del queue[name]
            ends = self._ends(self._rules[name])
            if ends != self._of_calls[name]:
                self._of_calls[name] = ends
                queue.update(dict.fromkeys(callers[name]))

    def _ends(self, expression: Expression) -> Ends:
        match expression:
            case RuleCall(name):
                return self._of_calls[name]
            case Chain(items):
                joined = NONE
                for item in items:
                    joined = self._joined(joined, self._ends(item))
                return joined
            case Choice(items):
                every = [self._ends(item) for item in items]
                first = last = 0
                for ends in every:
                    first, last = first | ends.first, last | ends.last
                return Ends(any(ends.empty for ends in every), first, last)
            case Repeat(item, least, most):
                ends = self._ends(item)
                if most != 1:
                    self._joined(ends, ends)
                return Ends(ends.empty or least == 0, ends.first, ends.last)
        raise TypeError(f"not over terminals: {type(expression).__name__}")

    def _joined(self, before: Ends, after: Ends) -> Ends:
        for index in _bits(before.last):
            self._follow[index] |= after.first
        first = before.first | after.first if before.empty else before.first
        last = after.last | before.last if after.empty else after.last
        return Ends(before.empty and after.empty, first, last)

    def _allowed_together(self, at_start: int) -> list[int]:
        """Returns for each terminal those that can be allowed where it is: at the start, or after terminals that match
        the same text."""
        starts = self._starts
        together = [0] * len(self._names)
        queue = [(at_start, at_start)] + [(follow, follow) for follow in set(self._follow)]
        done: set[tuple[int, int]] = set()
        while queue:
            some, others = queue.pop()
            if (some, others) in done:
                continue
            done |= {(some, others), (others, some)}
            for index in _bits(some):
                fresh = others & ~together[index]
                together[index] |= fresh
                for other in _bits(fresh):
                    together[other] |= 1 << index
                    if starts[index] & starts[other] and self._match_one_text(index, other):
                        queue.append((self._follow[index], self._follow[other]))
        return together

    def _match_one_text(self, index: int, other: int) -> bool:
        """Some text is matched by both terminals; also where it takes too long to tell."""
        machine, other_machine = self._machines[index], self._machines[other]
        if machine is None or other_machine is None:
            return True
        seen, rest = {(0, 0)}, [(0, 0)]
        while rest and len(seen) <= MAX_PAIRS:
            first, second = rest.pop()
            if machine.accepting[first] and other_machine.accepting[second]:
                return True
            fresh = set(_common(machine.moves[first], other_machine.moves[second])) - seen
            seen |= fresh
            rest += fresh
        return bool(rest)

    def _going_on(self, index: int, other: int) -> int:
        """First bytes of what follows a text of one terminal, not the empty one, in longer texts of the other one."""
        machine, other_machine = self._machines[index], self._machines[other]
        if machine is None or other_machine is None:
            return ALL_BYTES
        following, seen, rest = 0, {(0, 0)}, [(0, 0)]
        while rest:
            first, second = rest.pop()
            for pair in _common(machine.moves[first], other_machine.moves[second]):
                if pair not in seen:
                    seen.add(pair)
                    rest.append(pair)
                if machine.accepting[pair[0]]:
                    following |= lead_bytes([(low, high) for low, high, _ in other_machine.moves[pair[1]]])
            if len(seen) > MAX_PAIRS:
                return ALL_BYTES
        return following


def _first_bytes(machine: Automaton | None) -> int:
    return ALL_BYTES if machine is None else lead_bytes([(first, last) for first, last, _ in machine.moves[0]])


def lead_bytes(ranges: Ranges | Sequence[tuple[int, int]]) -> int:
    """Returns the first bytes of these characters in UTF-8."""
    lead = 0
    for first, last in ranges:
        for low, high, base, shift in ((0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 6), (0x800, 0xFFFF, 0xE0, 12)):
            lead |= _span(max(first, low), min(last, high), base, shift)
        lead |= _span(max(first, 0x10000), last, 0xF0, 18)
    return lead


def _span(first: int, last: int, base: int, shift: int) -> int:
    if first > last:
        return 0
    low, high = base | first >> shift, base | last >> shift
    return (1 << high + 1) - (1 << low)


def _common(some: Sequence[tuple[int, int, int]], others: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Targets of two states' moves by the same characters."""
    here = there = 0
    while here < len(some) and there < len(others):
        first, last, target = some[here]
        low, high, other = others[there]
        if first <= high and low <= last:
            yield target, other
        if last < high:
            here += 1
        else:
            there += 1


def _machine(item: Expression) -> Automaton | None:
    """None where it takes too many states."""
    try:
        return automaton(item, MAX_STATES)
    except GrammarError:
        return None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
