"""Rules as a client wrote them: what is checked of them, and the language that they become."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from tureen.errors import echo
from tureen.grammar.expression import Expression, GrammarError, Language, Repeat
from tureen.grammar.left_recursion import without_left_recursion
from tureen.grammar.rules import can_end, holding, parts, simplified

MAX_RULES = 1_000
MAX_PARTS = 20_000  # of all rules together, those that are repeated {n} times counted n times


@dataclass(slots=True)
class WrittenRules:
    """The rules as they were written, by name, with the lines they start in and the lines of the first calls."""

    rules: dict[str, Expression] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)  # rule called -> by which rule, line


def language_of_rules(grammar: WrittenRules, root: str, define: str) -> Language:
    """Returns the language of the rule `root`, without Terminals. Raises GrammarError.

    A rule without recursion becomes one regular expression, if it is not too large. `define` is the sign that defines
    a rule in the notation.
    """
    _check_names(grammar, root, define)
    rules = grammar.rules
    _check_size(rules)
    endless = rules.keys() - holding(rules, can_end)
    if endless:
        name = next(name for name in rules if name in endless)
        raise GrammarError(
            f"rule {echo(name)} (line {grammar.lines[name]}) can never end: every alternative needs a rule that needs "
            f"itself again, or matches nothing; give it an alternative that ends"
        )
    return simplified(root, without_left_recursion(rules))


def fault(what: str, line: int, fix: str = "") -> GrammarError:
    """Returns the error about a line."""
    return GrammarError(f"{what} (line {line})" + (f"; {fix}" if fix else ""))


def begin_rule(grammar: WrittenRules, name: str, line: int, kind: str = "") -> None:
    """Notes where a rule is defined. `kind`: what errors say before its name. Raises GrammarError for the second rule
    of a name, and for one too many."""
    if name in grammar.lines:
        raise fault(
            f"{kind}{echo(name)} is defined twice: in line {grammar.lines[name]} and again",
            line,
            "put the alternatives into one rule, with | between them",
        )
    if len(grammar.lines) == MAX_RULES:
        raise fault("the grammar is too large: it has more rules than this", line, f"at most {MAX_RULES}")
    grammar.lines[name] = line


def _check_names(grammar: WrittenRules, root: str, define: str) -> None:
    if root not in grammar.rules:
        names = ", ".join(echo(name) for name in list(grammar.rules)[:5]) or "none"
        raise GrammarError(
            f"there is no rule '{root}', where every output starts (rules: {names}); write {root}{define} …"
        )
    for name, (caller, line) in grammar.calls.items():
        if name not in grammar.rules:
            similar = difflib.get_close_matches(name, grammar.rules, 1)
            hint = (
                f"did you mean {echo(similar[0])}?"
                if similar
                else f"add {name[:64]}{define} …, or quote it as a literal"
            )
            raise fault(f"rule {echo(caller)} calls {echo(name)}, which is not defined", line, hint)


def _check_size(rules: dict[str, Expression]) -> None:
    total = 0
    for name, rule in rules.items():
        total += _written_out(rule)
        if total > MAX_PARTS:
            raise GrammarError(
                f"the grammar is too large: up to rule {echo(name)} it has more than {MAX_PARTS} parts with every "
                f"repetition {{n}} written out; at most {MAX_PARTS}"
            )


def _written_out(expression: Expression) -> int:
    if isinstance(expression, Repeat):
        return max(1, expression.least, expression.most or 0) * _written_out(expression.item)
    return 1 + sum(_written_out(part) for part in parts(expression))
