"""Rules that call themselves first, rewritten so that none does."""

from __future__ import annotations

from collections.abc import Iterable

from tureen.errors import echo
from tureen.grammar.expression import (
    EMPTY,
    NOTHING,
    Chain,
    Choice,
    Expression,
    GrammarError,
    Repeat,
    RuleCall,
    Terminal,
)
from tureen.grammar.rules import EmptyFree, Rules, calls_each_other, can_be_empty, chain, choice, holding, left_calls

MAX_GROUP = 40  # rules that call each other first


def without_left_recursion(rules: Rules) -> dict[str, Expression]:
    """Returns rules of the same languages, of which none can call itself before a character is matched.

    Every rule must be able to end. As in Rosenkrantz, "Matrix equations and normal forms for context-free grammars"
    (1967): rules that call each other first are linear equations over what follows the calls, and are solved as such.
    A rule with itself alone becomes a repetition. Raises GrammarError where too many call each other.
    """
    empty = holding(rules, can_be_empty)
    solved = dict(rules)
    for names in calls_each_other({name: left_calls(rule, empty) for name, rule in rules.items()}):
        if len(names) > MAX_GROUP:
            raise GrammarError(
                f"{len(names)} rules call each other before any character is matched, {echo(names[0])} among them; at "
                f'most {MAX_GROUP} may: write repetitions with *, as in item ("," item)*'
            )
        solved = _Equations(solved, names, empty).solved()
        empty = holding(solved, can_be_empty)
    return solved


class _Equations:
    """Rules that call each other first: `rest[a, b]` are the parts that follow a call of a in b, `own[b]` the
    alternatives of b that begin with a character of their own. None of these is empty."""

    def __init__(self, rules: Rules, names: list[str], empty: set[str]) -> None:
        self._rules = dict(rules)
        self._names = names
        self._empty = empty
        self._full = {name: self._fresh(f"{name}-full") if name in empty else name for name in names}
        self._free = EmptyFree(self._rules, self._full)
        self._own: dict[str, list[Expression]] = {name: [] for name in names}
        self._rest: dict[tuple[str, str], list[Expression]] = {}
        self._same: dict[str, set[str]] = {name: {name} for name in names}  # a -> every b that an a is also one of
        for name in names:
            self._read(name)

    def solved(self) -> dict[str, Expression]:
        """Returns all rules, with these solved."""
        if len(self._names) == 1:
            name = self._names[0]
            own = choice(self._own[name])
            rests = choice(self._without_last_call(rest, own) for rest in self._rest.get((name, name), ()))
            self._define(name, chain((own, EMPTY if rests == NOTHING else Repeat(rests))))
        else:
            self._define_all()
        self._rules.update(self._free.pending())
        return self._rules

    def _without_last_call(self, rest: Expression, own: Expression) -> Expression:
        """Returns what can stand for `rest` in own (rest)*. If a rest ends with a call of the rule itself, that one's
        own beginning is enough, because the repetition goes on as the call would: "a" ("+" x)* is "a" ("+" "a")*."""
        full = self._full[self._names[0]]
        match rest:
            case RuleCall(name) if name == full:
                return own
            case Choice(items):
                return choice(self._without_last_call(item, own) for item in items)
            case Chain(items):
                return chain((*items[:-1], self._without_last_call(items[-1], own)))
        return rest

    def _define(self, name: str, full: Expression) -> None:
        self._rules[self._full[name]] = full
        if name in self._empty:
            self._rules[name] = Choice((EMPTY, RuleCall(self._full[name])))

    def _define_all(self) -> None:
        """A rule is any rule's own beginning, and what may follow that one until it is this rule."""
        tails = {(first, last): self._fresh(f"{first}>{last}>") for first in self._names for last in self._names}
        for last in self._names:
            self._define(
                last,
                choice(chain((own, RuleCall(tails[name, last]))) for name in self._names for own in self._own[name]),
            )
        rests: dict[tuple[str, str], Expression] = {}
        for (first, last), items in self._rest.items():
            name = self._fresh(f"{first}>>{last}>")
            self._rules[name] = choice(items)
            rests[first, last] = RuleCall(name)
        reached = self._reached()
        for (first, last), tail in tails.items():
            steps: list[Expression] = [EMPTY] if last in reached[first] else []
            for name in sorted(reached[first]):
                steps += [
                    chain((rests[name, then], RuleCall(tails[then, last])))
                    for then in self._names
                    if (name, then) in rests
                ]
            self._rules[tail] = choice(steps) if steps else NOTHING

    def _reached(self) -> dict[str, set[str]]:
        """For each rule all rules that one of it is also one of, over any number of steps."""
        reached = {name: set(same) for name, same in self._same.items()}
        is_growing = True
        while is_growing:
            is_growing = False
            for names in reached.values():
                more = {other for name in names for other in reached[name]} - names
                names |= more
                is_growing = is_growing or bool(more)
        return reached

    def _read(self, name: str) -> None:
        for head, rest in self._beginnings(self._rules[name]):
            if head is None:
                self._own[name].append(rest)
                continue
            if can_be_empty(rest, self._empty):
                self._same[head].add(name)
            full = self._free.non_empty(rest)
            if full != NOTHING:
                self._rest.setdefault((head, name), []).append(full)

    def _beginnings(self, expression: Expression) -> Iterable[tuple[str | None, Expression]]:
        """The texts that are not empty: those that begin with a call of one of these rules, with the rest, and others,
        of which none can be empty."""
        if not any(name in self._full for name in left_calls(expression, self._empty)):
            full = self._free.non_empty(expression)
            if full != NOTHING:
                yield None, full
            return
        match expression:
            case RuleCall(name):
                yield name, EMPTY
            case Choice(items):
                for item in items:
                    yield from self._beginnings(item)
            case Terminal(item):
                yield from self._beginnings(item)
            case Repeat(item, least, most):
                more = Repeat(item, max(least - 1, 0), None if most is None else most - 1) if most != 1 else EMPTY
                for head, rest in self._beginnings(item):
                    yield head, chain((rest, more))
            case Chain(items):
                yield from self._in_chain(items)

    def _in_chain(self, items: tuple[Expression, ...]) -> Iterable[tuple[str | None, Expression]]:
        for at, item in enumerate(items):
            for head, rest in self._beginnings(item):
                yield head, chain((rest, *items[at + 1 :]))
            if not can_be_empty(item, self._empty):
                return

    def _fresh(self, name: str) -> str:
        while name in self._rules:
            name += ">"
        self._rules[name] = NOTHING
        return name
