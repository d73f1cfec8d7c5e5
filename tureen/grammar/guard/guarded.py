"""Grammars with a guard: it removes the tokens that the grammar allows but that would break a fact.

The native kernels do that: kernels/cpu/src/guard.h.
"""

from __future__ import annotations

from typing import Any

from tureen.grammar.base import CompiledGrammar, Mask
from tureen.grammar.follower import CompiledLanguage, LanguageCompiler, LanguagePlace, following_a_language
from tureen.grammar.guard.facts import FixedStep, FreeStep, GuardFacts, KeyStep, ValueStep
from tureen.grammar.guard.multiples import can_be_multiple, is_multiple, shortest_rest

RESERVE, RESERVE_OF_KEY, RESERVE_OF_BRANCH = 8, 12, 24
KINDS = {FixedStep: 0, FreeStep: 1, ValueStep: 2, KeyStep: 3}
"""The numbers of the kinds of steps in the native code."""


def load_guarded(program: bytes, facts: GuardFacts | None, compiler: LanguageCompiler) -> CompiledGrammar:
    """Loads a program, with a guard if there are facts. Raises GrammarError, and ValueError for a program of another
    version."""
    compiled = compiler.load(program)
    if facts is None:
        return compiled
    return GuardedCompiled(compiled, facts, compiler)


class GuardedCompiled:
    """A compiled grammar, all of whose outputs are guarded."""

    def __init__(self, inner: CompiledLanguage, facts: GuardFacts, compiler: LanguageCompiler) -> None:
        """Raises ValueError for facts that lead to nothing."""
        self.ends = inner.ends
        self.least = inner.least
        self.texts = compiler.vocabulary.tokens
        self._inner = inner
        self._facts = facts
        self._native = compiler.native
        self._tokens = compiler.guard_tokens
        self._native_facts = compiler.native.GuardFacts.of(facts, KINDS, inner.follower)

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + 500 * len(self._facts.nodes)

    @property
    def reserve(self) -> int:
        """Returns how many tokens an end may take because of the guard: an item must differ, keys must come, a value
        must become another than the shortest."""
        counted = sum(node.least_keys + (node.count.least if node.count else 0) for node in self._facts.nodes)
        return RESERVE + RESERVE_OF_KEY * counted + (RESERVE_OF_BRANCH if self._inner.follower.num_branches else 0)

    def start(self) -> GuardedGrammar:
        guard = self._native.Guard(self._native_facts, self._tokens, self._inner.follower, self._is_right)
        return GuardedGrammar(guard, self._inner.at(guard.language), self)

    def shortest_rest(self, number: tuple[bytes, int]) -> list[int]:
        """Returns the tokens that lead nearest to the end of a number of a node, the longest first."""
        text, node = number
        step, bounds = self._facts.nodes[node].step, self._facts.nodes[node].bounds
        rest = b"" if step is None else shortest_rest(text, step, bounds)
        tokens: list[int] = self._tokens.beginning(rest)
        return tokens[::-1]

    def _is_right(self, node: int, number: bytes, is_whole: bool) -> bool:
        """Returns whether a number is a multiple, or if it is not whole, can become one."""
        step, bounds = self._facts.nodes[node].step, self._facts.nodes[node].bounds
        if step is None:
            return True
        return is_multiple(number, step) if is_whole else can_be_multiple(number, step, bounds)


class GuardedGrammar:
    """The place of one output in a guarded grammar."""

    def __init__(self, guard: Any, inner: LanguagePlace, compiled: GuardedCompiled) -> None:
        """`guard`: the native one. `inner`: the place in the grammar alone."""
        self._guard = guard
        self._inner = inner
        self._compiled = compiled
        self.rollback = guard.rollback
        self.restrict, self.num_closing = inner.restrict, inner.num_closing

    def fill_mask(self, mask: Mask) -> None:
        with following_a_language:
            self._guard.fill(mask)

    def accept(self, token_id: int) -> bool:
        with following_a_language:
            is_allowed: bool = self._guard.accept(token_id)
        return is_allowed

    def forced(self) -> list[int]:
        forced = self._inner.forced()
        texts = self._compiled.texts
        for count in range(1, len(forced) + 1):
            with following_a_language:
                if not self._guard.allows(b"".join(texts[token_id] for token_id in forced[:count])):
                    return forced[: count - 1]
        return forced

    def nearer(self) -> list[int]:
        """Returns tokens that lead nearer to the end than closing can know: those of a number that is no multiple
        yet."""
        number = self._guard.number
        return [] if number is None else self._compiled.shortest_rest(number)

    @property
    def is_accepting(self) -> bool:
        with following_a_language:
            return bool(self._guard.accepts)

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    @property
    def is_free(self) -> bool:
        return self._inner.is_free

    @property
    def cost(self) -> int:
        return self._inner.cost

    @property
    def num_places(self) -> int:
        """Returns how many things the value that is being written may be so far."""
        num_places: int = self._guard.num_places
        return num_places

    @property
    def num_parts_read(self) -> int:
        """Returns the parts of items and keys that were compared to others, for tests that count work."""
        num_parts: int = self._guard.num_parts_read
        return num_parts
