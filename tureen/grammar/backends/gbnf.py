"""A language in xgrammar's dialect of GBNF (the grammars of llama.cpp)."""

from __future__ import annotations

from tureen.grammar.backends.patterns import count
from tureen.grammar.backends.terminals import uncut_terminal_grammar
from tureen.grammar.expression import (
    ANY_CHAR,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.regular import Automaton, automaton, rules_of

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ,:;<>=!@%(){}+*?.|/&~#$")
"""Characters that stand for themselves in strings and classes."""


MAX_STATES = 300
MAX_MOVES = 3_000
"""Moves of a terminal's automaton that is written as rules; a terminal with more of them is written as it is."""


def gbnf(language: Language) -> str:
    """Returns the rules in the notation of llama.cpp; the first one is `root`. Raises GrammarError.

    What is regular becomes a rule for each state of its automaton. The library works out the masks of these when it
    compiles; of alternatives and counted repeats inside of repeats it has to compute them at every token, which takes
    it a hundred times as long as a mask may.
    """
    grammar = uncut_terminal_grammar(language)
    writer = GbnfWriter()
    lines = [f"root ::= {writer.written(grammar.start)}"]
    lines += [f"{name} ::= {writer.written(rule)}" for name, rule in grammar.rules.items()]
    lines += [f"{name} ::= {writer.terminal(item)}" for name, item in grammar.terminals.items()]
    return "\n".join([*lines, *writer.lines]) + "\n"


class GbnfWriter:
    """Writes expressions. `lines` are the rules that they call."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._automata = 0

    def terminal(self, item: Expression) -> str:
        """Returns how a terminal, which is regular, is written."""
        if isinstance(item, Text | Chars):
            return self.written(item)
        try:
            machine = automaton(item, MAX_STATES)
        except GrammarError:
            return self.written(item)
        if sum(map(len, machine.moves)) > MAX_MOVES:
            return self.written(item)
        return self._by_states(machine)

    def written(self, expression: Expression) -> str:
        """Returns how an expression of any kind is written."""
        match expression:
            case Text(text):
                return f'"{"".join(map(_char, text))}"'
            case Chars(ranges):
                return _class(ranges)
            case Chain(items):
                return f"({' '.join([self.written(item) for item in items])})" if items else '""'
            case Choice(items):
                return f"({' | '.join([self.written(item) for item in items])})"
            case Repeat(item, least, most):
                return f"({self.written(item)}){count(least, most)}"
            case Terminal(item):
                return self.written(item)
            case RuleCall(name):
                return name
            case Both() | Not():
                return self._by_states(automaton(expression))

    def _by_states(self, machine: Automaton) -> str:
        grammar = rules_of(machine, f"m{self._automata}-")
        self._automata += 1
        self.lines += [f"{name} ::= {self.written(rule)}" for name, rule in grammar.rules.items()]
        return self.written(grammar.start)


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    if ranges == ANY_CHAR.ranges:
        return r"[\x00-\U0010FFFF]"
    return f"[{''.join(_range(*span) for span in ranges)}]"


def _range(first: int, last: int) -> str:
    return _char(chr(first)) if first == last else f"{_char(chr(first))}-{_char(chr(last))}"


def _char(char: str) -> str:
    return char if char in PLAIN else f"\\U{ord(char):08X}"
