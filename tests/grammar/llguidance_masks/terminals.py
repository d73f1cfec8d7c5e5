"""A language as rules over terminals that a greedy lexer without backtracking is never wrong about.

An expression that is marked as Terminal becomes a terminal. So do the largest regular parts of the rest, as long as it
is certain where they end; where it is not, they are cut up, down to single characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import is_

from llguidance_masks.ambiguity import Ambiguity
from llguidance_masks.facts import CALLS, COMBINED, DEAD, MARKED, Facts

from tureen.grammar.expression import (
    EMPTY,
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    FreeText,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.regular import Automaton, automaton, is_empty
from tureen.grammar.rules import (
    calls,
    can_be_empty,
    can_end,
    chain,
    choice,
    holding,
    parts,
    reachable,
    repeat,
    replaced,
)

MAX_INLINED = 200
"""Parts of a rule that is written out where it is called."""

MAX_INLINED_DEPTH = 100

MAX_COMPARED = 400
"""With more terminals than these, what is not marked is cut up at once, without looking for what is certain."""

MAX_ROUNDS = 16
"""Rounds of finding what is not certain; after them all that is not marked is cut up."""

MAX_CUT_STATES = 2_000


@dataclass(frozen=True, slots=True)
class TerminalGrammar:
    """A language whose rules are made of calls only: of rules (r0, r1, …) and of terminals (T0, T1, …)."""

    start: Expression
    rules: Mapping[str, Expression]
    terminals: Mapping[str, Expression]
    uses: Mapping[str, int]  # how often each is called


def terminal_grammar(language: Language) -> TerminalGrammar:
    """Splits a language for a greedy lexer. Raises GrammarError: nothing matches, it is nested too deep, or too
    large."""
    lifting = TerminalLifting(*_pruned(language))
    grammar = lifting.result()
    while lifting.cut_uncertain(grammar):
        grammar = lifting.result()
    return grammar


def uncut_terminal_grammar(language: Language) -> TerminalGrammar:
    """Splits a language for a library without a lexer: nothing is cut up. Raises GrammarError."""
    return TerminalLifting(*_pruned(language)).result()


def pruned(language: Language) -> Language:
    """Removes rules that are part of no text. Raises GrammarError when nothing fits, or it is nested too deep."""
    return _pruned(language)[0]


def _pruned(language: Language) -> tuple[Language, Facts]:
    language = replace(language, start=_without_free(language.start))
    facts = Facts(language)
    rules = {name: _settled(rule, facts) for name, rule in language.rules.items()}
    start = _settled(language.start, facts)
    is_settled = start is language.start and all(map(is_, rules.values(), language.rules.values()))
    ending = set(rules) if language.is_live and is_settled else holding(rules, can_end)
    if not can_end(start, ending):
        raise GrammarError("no text at all fits: the parts of the grammar contradict each other")
    has_nothing = any(facts.has(item, DEAD) for item in (language.start, *language.rules.values()))
    if is_settled and not has_nothing and len(ending) == len(rules):
        return language, facts
    rules = {name: _live(rule, ending) for name, rule in rules.items() if name in ending}
    start = _live(start, ending)
    live = Language(start, reachable(start, rules))
    return live, Facts(live)


def _without_free(expression: Expression) -> Expression:
    """Returns the same language without the marks of free text, which only the start of a structural tag holds."""
    match expression:
        case FreeText(item):
            return item
        case Chain(items) | Choice(items):
            return type(expression)(tuple(map(_without_free, items)))
        case Repeat(item):
            return replace(expression, item=_without_free(item))
    return expression


def _settled(expression: Expression, facts: Facts) -> Expression:
    """With Choice(()) for what is combined or excluded so that nothing is left."""
    if not facts.has(expression, COMBINED):
        return expression
    match expression:
        case Both(first, Not(second)) if _is_endless(first) and _is_endless(second) is False:
            return expression
        case Both() | Not():
            return NOTHING if is_empty(expression) else expression
        case Terminal(item, is_live):
            settled = item if is_live else _settled(item, facts)
            return expression if settled is item else Terminal(settled)
        case Chain(items) | Choice(items):
            all_settled = tuple(_settled(item, facts) for item in items)
            return expression if all(map(is_, all_settled, items)) else type(expression)(all_settled)
        case Repeat(item, least, most):
            settled = _settled(item, facts)
            return expression if settled is item else Repeat(settled, least, most)
    return expression


def _is_endless(expression: Expression) -> bool | None:
    """It matches infinitely many strings. None where a quick look does not tell."""
    match expression:
        case Text():
            return False
        case Chars(ranges):
            return False if ranges else None
        case Chain(items) | Choice(items) if items:
            inside = [_is_endless(item) for item in items]
            return None if None in inside else True in inside
        case Repeat(item, _, most):
            inner = _is_endless(item)
            return inner if most else True if most is None and inner is not None and not can_be_empty(item) else None
    return None


def _live(expression: Expression, ending: set[str]) -> Expression:
    """The expression without alternatives that match nothing."""
    match expression:
        case Chain(items):
            return chain(_live(item, ending) for item in items)
        case Choice(items):
            return choice(_live(item, ending) for item in items if can_end(item, ending))
        case Repeat(item, least, most):
            return repeat(_live(item, ending), least, most) if can_end(item, ending) else EMPTY
        case Terminal(item):
            return expression if expression.is_live else Terminal(_live(item, ending))
    return expression


class TerminalLifting:
    """Makes terminals of a language's regular parts, and cuts up those that are not certain."""

    def __init__(self, language: Language, facts: Facts) -> None:
        self._facts = facts
        self._flat = flat_rules(language.rules, MAX_INLINED)
        self._calls = {name: RuleCall(f"r{index}") for index, name in enumerate(language.rules)}
        self._lifted_calls = {name: call for name, call in self._calls.items() if name not in self._flat}
        self._firm: dict[int, bool] = {}  # by id: it holds a mark, or a call of a rule that is not flat
        self._lifted_marks: dict[int, RuleCall] = {}
        self._terminals: dict[Expression, str] = {}  # by what they match
        self._marked: set[str] = set()
        self._machines: dict[str, Automaton | None] = {}
        self._start = self._lift(language.start)
        self._rules = {
            self._calls[name].name: self._lift(rule) for name, rule in language.rules.items() if name not in self._flat
        }
        self._rounds = 0

    def result(self) -> TerminalGrammar:
        """Returns the language as it is split by now."""
        uses = Counter(calls(self._start))
        waiting, known = list(uses), set(uses)
        while waiting:
            rule = self._rules.get(waiting.pop())
            if rule is not None:
                names = calls(rule)
                uses.update(names)
                fresh = set(names) - known
                known |= fresh
                waiting += fresh
        rules = {name: rule for name, rule in self._rules.items() if name in uses}
        terminals = {name: item for item, name in self._terminals.items() if name in uses}
        return TerminalGrammar(self._start, rules, terminals, uses)

    def cut_uncertain(self, grammar: TerminalGrammar) -> bool:
        """Cuts up what a lexer could be wrong about; False if there is nothing."""
        self._rounds += 1
        loose = [name for name, item in grammar.terminals.items() if name not in self._marked and _can_be_cut(item)]
        if not loose or (isinstance(grammar.start, RuleCall) and grammar.start.name in grammar.terminals):
            return False
        if len(grammar.terminals) > MAX_COMPARED or self._rounds > MAX_ROUNDS:
            pieces = {name: self._pieces(grammar.terminals[name]) for name in loose}
        else:
            pieces = self._certain_pieces(grammar)
        self._start = _over_terminals(replaced(self._start, lambda name: pieces.get(name) or RuleCall(name)))
        self._rules = {
            rule: _over_terminals(replaced(body, lambda name: pieces.get(name) or RuleCall(name)))
            for rule, body in self._rules.items()
        }
        return bool(pieces)

    def _certain_pieces(self, grammar: TerminalGrammar) -> dict[str, Expression]:
        """Returns the expressions that take the place of the terminals that are not certain."""
        pieces: dict[str, Expression] = {}
        for name, other in Ambiguity(grammar.start, grammar.rules, grammar.terminals, self._machines).conflicts():
            cut = other if _can_be_cut(grammar.terminals[other]) else name
            if cut in pieces or (name == other and name in self._marked):
                continue
            item = grammar.terminals[cut]
            if isinstance(item, Chain) and len(item.items) > 2:  # where it ends, or may have ended, matters first
                at = len(item.items) - 1 if name == other else 1
                item = Chain((chain(item.items[:at]), chain(item.items[at:])))
            pieces[cut] = self._pieces(item)
        return pieces

    def _lift(self, expression: Expression) -> Expression:
        return self._lift_firm(expression) if self._is_firm(expression) else self._loose(expression)

    def _lift_firm(self, expression: Expression) -> Expression:
        if isinstance(expression, RuleCall):
            return self._calls[expression.name]
        if isinstance(expression, Terminal):
            lifted = self._lifted_marks.get(id(expression))
            if lifted is None:
                lifted = self._lifted_marks[id(expression)] = self._terminal(expression.item, marked=True)
            return lifted
        if isinstance(expression, Chain):
            return Chain(tuple(self._lifted_run(expression.items)))
        if isinstance(expression, Repeat):
            return Repeat(self._lift(expression.item), expression.least, expression.most)
        if isinstance(expression, Choice):
            return Choice(tuple([self._lift(item) for item in expression.items]))
        raise GrammarError("only what is regular can be excluded or combined")

    def _is_firm(self, expression: Expression) -> bool:
        if isinstance(expression, RuleCall):
            return expression.name not in self._flat
        flags = self._facts.flags(expression)
        if flags & MARKED or not flags & CALLS:
            return bool(flags & MARKED)
        if not self._flat:
            return True
        known = self._firm.get(id(expression))
        if known is None:
            known = self._firm[id(expression)] = any(map(self._is_firm, parts(expression)))
        return known

    def _lifted_run(self, items: tuple[Expression, ...]) -> list[Expression]:
        """The items of a chain; neighbours that are regular and not marked are one terminal."""
        lifted_items: list[Expression] = []
        loose: list[Expression] = []
        lifted_calls = self._lifted_calls
        for item in items:
            lifted = lifted_calls.get(item.name) if type(item) is RuleCall else self._lifted_marks.get(id(item))
            if lifted is not None and not loose:  # as most
                lifted_items.append(lifted)
                continue
            if not self._is_firm(item):
                loose.append(item)
                continue
            if loose:
                lifted_items.append(self._loose(chain(loose)))
                loose = []
            lifted_items.append(self._lift_firm(item))
        return [*lifted_items, self._loose(chain(loose))] if loose else lifted_items

    def _loose(self, expression: Expression) -> Expression:
        item = replaced(expression, self._flat.__getitem__)
        return EMPTY_CHAIN if item == EMPTY else self._terminal(item)

    def _terminal(self, item: Expression, *, marked: bool = False) -> RuleCall:
        name = self._terminals.setdefault(item, f"T{len(self._terminals)}")
        if marked:
            self._marked.add(name)
        return RuleCall(name)

    def _pieces(self, item: Expression) -> Expression:
        match item:
            case Text(text):
                return Chain(tuple(self._terminal(Chars(((ord(char), ord(char)),))) for char in text))
            case Chain(items):
                return Chain(tuple(self._terminal(part) for part in items))
            case Choice(items):
                return Choice(tuple(self._terminal(part) for part in items))
            case Repeat(part, least, most):
                return Repeat(self._terminal(part), least, most)
            case Terminal(part):
                return self._terminal(part)
        return self._by_characters(item)

    def _by_characters(self, item: Expression) -> Expression:
        """The rules of its automaton."""
        grammar = rules_of(automaton(item, MAX_CUT_STATES), f"a{len(self._rules)}x")
        for name, rule in grammar.rules.items():
            self._calls[name] = RuleCall(name)
            self._rules[name] = self._lift_characters(rule)
        return grammar.start

    def _lift_characters(self, rule: Expression) -> Expression:
        match rule:
            case Chars():
                return self._terminal(rule)
            case Chain(items):
                return Chain(tuple(self._lift_characters(item) for item in items))
            case Choice(items):
                return Choice(tuple(self._lift_characters(item) for item in items))
        return EMPTY_CHAIN if rule == EMPTY else rule


def rules_of(machine: Automaton, prefix: str) -> Language:
    """Returns a right-linear grammar of the same language without Both and Not; its rules are `prefix` and a number."""
    rules: dict[str, Expression] = {}
    for state, accepting in enumerate(machine.accepting):
        options: list[Expression] = [EMPTY] if accepting else []
        spans: dict[int, list[tuple[int, int]]] = {}
        for first, last, target in machine.moves[state]:
            spans.setdefault(target, []).append((first, last))
        for target, ranges in spans.items():
            is_last = machine.accepting[target] and not machine.moves[target]
            chars = Chars(tuple(ranges))
            options.append(chars if is_last else Chain((chars, RuleCall(f"{prefix}{target}"))))
        rules[f"{prefix}{state}"] = options[0] if len(options) == 1 else Choice(tuple(options))
    return Language(RuleCall(f"{prefix}0"), rules)


EMPTY_CHAIN = Chain(())


def _over_terminals(expression: Expression) -> Expression:
    """With EMPTY_CHAIN for what is empty, and may stand anywhere in it."""
    match expression:
        case Chain(items) | Choice(items):
            return type(expression)(tuple(map(_over_terminals, items)))
        case Repeat(item, least, most):
            return Repeat(_over_terminals(item), least, most)
    return EMPTY_CHAIN if expression == EMPTY else expression


def flat_rules(rules: Mapping[str, Expression], max_parts: int) -> dict[str, Expression]:
    """Returns the regular rules without marks, written out; not those that take more parts for it, or nest too deep."""
    flat: dict[str, Expression] = {}
    extents: dict[str, tuple[int, int]] = {}
    plain = {name: tuple(calls(rule)) for name, rule in rules.items() if not _is_marked(rule)}
    fresh = bool(plain)
    while fresh:
        fresh = False
        for name, callees in reversed(list(plain.items())):  # callers mostly come first
            if name in flat or any(callee not in flat for callee in callees):
                continue
            size, depth = _extent(rules[name], extents)
            if size <= max_parts and depth <= MAX_INLINED_DEPTH:
                flat[name] = replaced(rules[name], flat.__getitem__)
                extents[name] = size, depth
                fresh = True
    return flat


def _extent(expression: Expression, of_calls: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """How many parts it has and how deep they are nested, with the calls written out."""
    if isinstance(expression, RuleCall):
        return of_calls[expression.name]
    inside = [_extent(part, of_calls) for part in parts(expression)]
    return 1 + sum(size for size, _ in inside), 1 + max((depth for _, depth in inside), default=0)


def _is_marked(expression: Expression) -> bool:
    return isinstance(expression, Terminal) or any(map(_is_marked, parts(expression)))


def _can_be_cut(item: Expression) -> bool:
    """It is not a single character."""
    return not isinstance(item, Chars) and not (isinstance(item, Text) and len(item.text) <= 1)
