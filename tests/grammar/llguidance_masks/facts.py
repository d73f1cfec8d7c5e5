"""Facts about the parts of a language: a pass over it need not look into those that are none of its business."""

from __future__ import annotations

from tureen.grammar.expression import Both, Chars, Expression, GrammarError, Language, Not, RuleCall, Terminal, Text
from tureen.grammar.rules import is_nothing, parts

MAX_DEPTH = 200

COMBINED = 1
"""It is, or holds, Both or Not."""
MARKED = 2
"""It is, or holds, a Terminal."""
CALLS = 4
"""It is, or holds, a call."""
DEAD = 8
"""It is, or holds, a part that visibly matches nothing."""

_LEVEL = 16
NO_CHAR = Chars(())


class Facts:
    """Tells what the parts of a language hold. Each is looked at once, however often it occurs."""

    def __init__(self, language: Language) -> None:
        """Raises GrammarError when it is nested deeper than MAX_DEPTH."""
        self._known: dict[int, int] = {}  # by id: the flags, and how deep it is in levels
        self._language = language  # so that no id is used again
        for expression in (language.start, *language.rules.values()):
            known = self._known.get(id(expression)) or self._look(expression, 1)
            if known // _LEVEL > MAX_DEPTH:
                raise self._too_deep()

    def has(self, expression: Expression, flag: int) -> bool:
        """Returns whether a part of the language is, or holds, something of the kind."""
        return bool(self._known[id(expression)] & flag)

    def flags(self, expression: Expression) -> int:
        """Returns the kinds of what a part of the language is, or holds."""
        return self._known[id(expression)] % _LEVEL

    def _look(self, expression: Expression, level: int) -> int:
        kind = type(expression)
        if kind is Text:
            known = _LEVEL
        elif kind is RuleCall:
            known = _LEVEL | CALLS
        elif kind is Chars:
            known = _LEVEL | (DEAD if expression == NO_CHAR else 0)
        else:
            known = self._of_parts(expression, level)
        self._known[id(expression)] = known
        return known

    def _of_parts(self, expression: Expression, level: int) -> int:
        if level > MAX_DEPTH:
            raise self._too_deep()
        flags, deepest, all_known = 0, 0, self._known
        kind = type(expression)
        for part in parts(expression):
            own_kind = type(part)
            if own_kind is RuleCall:  # each is a part of its own
                known = all_known[id(part)] = _LEVEL | CALLS
            elif own_kind is Terminal and (part.is_live or type(part.item) is Text):  # type: ignore[union-attr]
                # as most; into what certainly matches something nobody looks
                known = all_known[id(part)] = 2 * _LEVEL | MARKED
            else:
                known = all_known.get(id(part)) or self._look(part, level + 1)
            flags |= known
            if known > deepest:  # of two that are as deep, their flags make no difference
                deepest = known
        flags %= _LEVEL
        if kind is Both or kind is Not:
            flags |= COMBINED
        elif kind is Terminal:
            flags |= MARKED
        elif is_nothing(expression):
            flags |= DEAD
        return flags | _LEVEL * (deepest // _LEVEL + 1)

    def _too_deep(self) -> GrammarError:
        return GrammarError(f"the grammar is nested too deep: at most {MAX_DEPTH} levels")
