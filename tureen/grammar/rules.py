"""Rules that call each other: what can go wrong in them, and their simplest equivalent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from tureen.grammar.expression import (
    ANY_CHAR,
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

Rules = Mapping[str, Expression]

SOMETHING = Repeat(ANY_CHAR, 1)

MAX_INLINED = 2_000
"""Parts of an expression that rules without recursion are made into, if it has not that many without the calls."""

MAX_INLINED_DEPTH = 150

MAX_REWRITTEN = 100_000
"""Parts looked at to make what is repeated non-empty."""


def parts(expression: Expression) -> tuple[Expression, ...]:
    """Returns the expressions that an expression is directly made of."""
    kind = type(expression)
    if kind is Chain or kind is Choice:
        return expression.items  # type: ignore[union-attr]  # mypy does not narrow by `kind`, which is much quicker
    if kind is Text or kind is Chars or kind is RuleCall:
        return ()
    if isinstance(expression, Both):
        return (expression.first, expression.second)
    assert isinstance(expression, Repeat | Terminal | FreeText | Not)
    return (expression.item,)


def calls(expression: Expression) -> list[str]:
    """Returns the names of the rules that an expression calls, as often as it does."""
    names: list[str] = []
    rest: list[tuple[Expression, ...]] = [(expression,)]
    while rest:
        for part in rest.pop():
            kind = type(part)
            if kind is RuleCall:
                names.append(part.name)  # type: ignore[union-attr]  # mypy does not narrow by `kind`: much quicker
            elif kind is not Text and kind is not Chars and kind is not Terminal:
                rest.append(parts(part))
    return names


def is_nothing(expression: Expression) -> bool:
    """Returns whether it is NOTHING. It is asked of every part of a grammar, where `==` takes three times as long."""
    return type(expression) is Choice and not expression.items


def is_empty_text(expression: Expression) -> bool:
    """Returns whether it is EMPTY."""
    return type(expression) is Text and not expression.text


def chain(items: Iterable[Expression]) -> Expression:
    """Joins items one after the other: EMPTY is left out, and with NOTHING it is NOTHING."""
    kept: list[Expression] = []
    for item in items:
        kind = type(item)
        if kind is Terminal or kind is RuleCall:  # as most
            kept.append(item)
        elif kind is Chain:
            kept += item.items  # type: ignore[union-attr]  # mypy does not narrow by `kind`, which is much quicker
        elif is_nothing(item):
            return NOTHING
        elif kind is not Text or item.text:  # type: ignore[union-attr]  # the same
            kept.append(item)
    return kept[0] if len(kept) == 1 else Chain(tuple(kept)) if kept else EMPTY


def choice(items: Iterable[Expression]) -> Expression:
    """Returns any of the items; what matches nothing is left out."""
    kept: list[Expression] = []
    for item in items:
        if isinstance(item, Choice):
            kept += item.items
        else:
            kept.append(item)
    return kept[0] if len(kept) == 1 else Choice(tuple(kept))


def repeat(item: Expression, least: int, most: int | None) -> Expression:
    """Repeats an item `least` to `most` times, None = without end."""
    if most == 0 or is_empty_text(item) or (least == 0 and is_nothing(item)):
        return EMPTY
    return NOTHING if is_nothing(item) else Repeat(item, least, most)


def replaced(expression: Expression, call: Callable[[str], Expression]) -> Expression:
    """Returns the expression with another one in the place of every call."""
    match expression:
        case RuleCall(name):
            return call(name)
        case Chain(items):
            return chain(replaced(item, call) for item in items)
        case Choice(items):
            return choice(replaced(item, call) for item in items)
        case Repeat(item, least, most):
            return repeat(replaced(item, call), least, most)
    return expression


def unmarked(expression: Expression) -> Expression:
    """Returns the same language without terminals."""
    match expression:
        case Terminal(item):
            return unmarked(item)
        case FreeText(item):
            return FreeText(unmarked(item))
        case Chain(items):
            return Chain(tuple(unmarked(item) for item in items))
        case Choice(items):
            return Choice(tuple(unmarked(item) for item in items))
        case Repeat(item, least, most):
            return Repeat(unmarked(item), least, most)
    return expression


def reachable(start: Expression, rules: Rules) -> dict[str, Expression]:
    """Returns the rules that `start` needs, in the order of `rules`."""
    needed: set[str] = set()
    rest = list(calls(start))
    while rest:
        name = rest.pop()
        if name not in needed:
            needed.add(name)
            rest.extend(calls(rules[name]))
    return {name: rule for name, rule in rules.items() if name in needed}


def can_be_empty(expression: Expression, empty: set[str] | frozenset[str] = frozenset()) -> bool:
    """Returns whether the empty string matches, where it does for exactly these rules."""
    match expression:
        case Text(text):
            return not text
        case RuleCall(name):
            return name in empty
        case Chain(items):
            return all(can_be_empty(item, empty) for item in items)
        case Choice(items):
            return any(can_be_empty(item, empty) for item in items)
        case Repeat(item, least, _):
            return least == 0 or can_be_empty(item, empty)
        case Both(first, second):
            return can_be_empty(first, empty) and can_be_empty(second, empty)
        case Not(item):
            return not can_be_empty(item, empty)
        case Terminal(item) | FreeText(item):
            return can_be_empty(item, empty)
    return False


def can_end(expression: Expression, ending: set[str]) -> bool:
    """Returns whether some string matches, where one does for exactly these rules. Of Both and Not it is taken for
    granted."""
    if isinstance(expression, Chain):
        for item in expression.items:
            kind = type(item)
            if kind is RuleCall:  # as most
                if item.name not in ending:  # type: ignore[union-attr]  # mypy does not narrow by `kind`
                    return False
            elif kind is not Text and not can_end(item, ending):
                return False
        return True
    if isinstance(expression, Terminal):
        return expression.is_live or type(expression.item) is Text or can_end(expression.item, ending)
    if isinstance(expression, Repeat):
        return expression.least == 0 or can_end(expression.item, ending)
    if isinstance(expression, RuleCall):
        return expression.name in ending
    if isinstance(expression, Choice):
        return any(can_end(item, ending) for item in expression.items)
    return not isinstance(expression, Chars) or bool(expression.ranges)


def holding(
    rules: Rules, test: Callable[[Expression, set[str]], bool], known: AbstractSet[str] = frozenset()
) -> set[str]:
    """Returns the smallest set of names such that a rule is in it exactly where `test(rule, set)` holds. `known` are in
    it, which need not be among the rules."""
    names = set(known)
    rest = []
    for name in reversed(list(rules)):  # callers mostly come first
        if test(rules[name], names):
            names.add(name)
        else:
            rest.append(name)
    callers: dict[str, set[str]] = defaultdict(set)
    for name in rest:
        for callee in calls(rules[name]):
            callers[callee].add(name)
    queue = dict.fromkeys(rest)
    while queue:
        name = next(iter(queue))
        del queue[name]
        if test(rules[name], names):
            names.add(name)
            queue.update(dict.fromkeys(callers[name] - names))
    return names


def left_calls(expression: Expression, empty: set[str]) -> list[str]:
    """Returns the names of the rules that can be called before any character is matched."""
    match expression:
        case RuleCall(name):
            return [name]
        case Chain(items):
            names: list[str] = []
            for item in items:
                names += left_calls(item, empty)
                if not can_be_empty(item, empty):
                    break
            return names
        case Choice(items):
            return [name for item in items for name in left_calls(item, empty)]
        case Repeat(item) | Terminal(item):
            return left_calls(item, empty)
    return []


def cycle(edges: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Returns names each of which leads to the next, the last one to the first; None where there are none."""
    done: set[str] = set()
    for root in edges:
        path: dict[str, Iterator[str]] = {} if root in done else {root: iter(edges[root])}
        while path:
            name = next(reversed(path))
            follower = next(path[name], None)
            if follower is None:
                done.add(name)
                del path[name]
            elif follower in path:
                names = list(path)
                return names[names.index(follower) :]
            elif follower not in done:
                path[follower] = iter(edges[follower])
    return None


def calls_each_other(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Returns the largest groups of names that all lead to each other, or to themselves; later ones may lead to earlier
    ones. Tarjan, "Depth-first search and linear graph algorithms" (1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_names: dict[str, None] = {}
    groups: list[list[str]] = []
    for root in edges:
        path = [] if root in number else [(root, iter(edges[root]))]
        while path:
            name, followers = path[-1]
            if name not in number:
                number[name] = lowest[name] = len(number)
                open_names[name] = None
            follower = next(followers, None)
            if follower is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    group = _popped(open_names, name)
                    groups += [group] if len(group) > 1 or name in edges[name] else []
            elif follower not in number:
                path.append((follower, iter(edges[follower])))
            elif follower in open_names:
                lowest[name] = min(lowest[name], number[follower])
    return groups


def _popped(names: dict[str, None], last: str) -> list[str]:
    """Takes the last names off, up to and with this one."""
    popped: list[str] = []
    while not popped or popped[-1] != last:
        popped.append(names.popitem()[0])
    return popped[::-1]


def simplified(start: str, rules: Rules) -> Language:
    """Returns the same language, in which nothing empty is repeated and every rule is needed by `start`.

    Rules without recursion become one regular expression where it is not too large. Every rule must be able to end.
    """
    needed = reachable(RuleCall(start), rules)
    needed = reachable(RuleCall(start), EmptyFree(needed).rewritten())
    ending = holding(needed, can_end)
    dead = needed.keys() - ending
    if dead:
        pruned = {n: replaced(rule, lambda m: NOTHING if m in dead else RuleCall(m)) for n, rule in needed.items()}
        needed = reachable(RuleCall(start), pruned)
    if cycle({name: list(calls(rule)) for name, rule in needed.items()}) is None:
        regular = _inlined(start, needed)
        if regular is not None:
            return Language(regular)
    return Language(RuleCall(start), needed)


def _inlined(start: str, rules: Rules) -> Expression | None:
    """`start` without calls, of rules without recursion. None where it would be too large."""
    done: dict[str, tuple[Expression, int, int]] = {}
    most = max(MAX_INLINED, _extent(Chain(tuple(rules.values())), defaultdict(lambda: (1, 1)))[0])
    rest = [start]
    while rest:
        missing = {name for name in calls(rules[rest[-1]]) if name not in done}
        if missing:
            rest += missing
            continue
        name = rest.pop()
        if name in done:
            continue
        size, depth = _extent(rules[name], {callee: done[callee][1:] for callee in calls(rules[name])})
        if size > most or depth > MAX_INLINED_DEPTH:
            return None
        done[name] = replaced(rules[name], lambda callee: done[callee][0]), size, depth
    return done[start][0]


def _extent(expression: Expression, of_calls: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """How many parts an expression has, and how deep they are nested, where these are the calls' own."""
    if isinstance(expression, RuleCall):
        return of_calls[expression.name]
    inner = [_extent(part, of_calls) for part in parts(expression)]
    return 1 + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)


class EmptyFree:
    """Rewrites rules so that what is repeated is never empty: x* is (x but not empty)*."""

    def __init__(self, rules: Rules, names: Mapping[str, str] | None = None) -> None:
        """`names`: rule -> the rule that matches the same but not the empty string, where there is one."""
        self._rules = rules
        self._empty = holding(rules, can_be_empty)
        self._names = dict(names or {})
        self._to_do: list[str] = []
        self._work = 0

    def rewritten(self) -> Rules:
        """Returns the rules, with those that they need besides."""
        rules = {name: self._rewrite(rule) for name, rule in self._rules.items()}
        return rules | self.pending()

    def pending(self) -> dict[str, Expression]:
        """Returns the rules that are needed besides, and have not been returned yet."""
        rules: dict[str, Expression] = {}
        while self._to_do:
            name = self._to_do.pop()
            rules[self._names[name]] = self.non_empty(self._rules[name])
        return rules

    def _rewrite(self, expression: Expression) -> Expression:
        self._count()
        match expression:
            case Chain(items):
                return chain(self._rewrite(item) for item in items)
            case Choice(items):
                return choice(self._rewrite(item) for item in items)
            case Repeat(item, least, most):
                if self._is_empty(item):
                    return repeat(self.non_empty(item), 0, most)
                return repeat(self._rewrite(item), least, most)
        return expression

    def non_empty(self, expression: Expression) -> Expression:
        """Returns the expression, rewritten, without the empty string."""
        self._count()
        if not self._is_empty(expression):
            return self._rewrite(expression)
        match expression:
            case RuleCall(name):
                return RuleCall(self._full_name(name))
            case Choice(items):
                return choice(self.non_empty(item) for item in items)
            case Chain(items):
                rests = [chain(self._rewrite(item) for item in items[at + 1 :]) for at in range(len(items))]
                return choice(chain((self.non_empty(item), rest)) for item, rest in zip(items, rests, strict=True))
            case Repeat(item, _, most):
                return NOTHING if most == 0 else repeat(self.non_empty(item), 1, most)
            case Both() | Not():
                return Both(expression, SOMETHING)
            case Terminal(item):
                return Terminal(Both(item, SOMETHING))
        return NOTHING

    def _count(self) -> None:
        self._work += 1
        if self._work > MAX_REWRITTEN:
            raise GrammarError(
                f"the grammar is too large: what it repeats can be empty, and writing out all the ways takes "
                f"more than {MAX_REWRITTEN} parts; do not repeat (…)*, (…)? or optional rules again"
            )

    def _is_empty(self, expression: Expression) -> bool:
        return can_be_empty(expression, self._empty)

    def _full_name(self, name: str) -> str:
        if name not in self._names:
            full = f"{name}-full"
            while full in self._rules:
                full += "-full"
            self._names[name] = full
            self._to_do.append(name)
        return self._names[name]
