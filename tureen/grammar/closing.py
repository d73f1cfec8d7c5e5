"""Outputs that come to an end in time: what that takes from each place of a language, in tokens of the vocabulary.

The native kernels, which the caller hands over, follow the language beside the backend. Without them nothing is brought
to an end.
docs/decisions/0053-answers-that-always-close.md says how it is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.grammar.backends.tokens import packed
from tureen.grammar.base import CompiledGrammar, Grammar, Mask, Vocabulary
from tureen.grammar.expression import (
    NOTHING,
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
from tureen.grammar.guard.guarded import GuardedCompiled
from tureen.grammar.rules import SOMETHING, can_be_empty, chain, choice, repeat

WORD_ZONE, SENTENCE_ZONE = 8, 32
"""Tokens to spare, at most, from which on no further word, or no further sentence, is begun. Of a short output these
are ..."""
WORD_SHARE, SENTENCE_SHARE = 8, 4  # ... no more than these parts: an eighth, a quarter

KINDS: dict[type, int] = {
    kind: number for number, kind in enumerate((Terminal, Text, Chars, Chain, Choice, Repeat, Both, Not, RuleCall), -1)
}
"""The kinds of expressions, as the native code has them; a terminal is written as its item."""

AT_A_WORD = 2  # of what the native code says of a mask


class Ending(NamedTuple):
    """The masks that belong to one under which a word may be gone on with or ended, but none begun.

    Only the model knows whether the word is complete: it is if the token that the model finds likeliest among those of
    `open` is not in the mask. Then `nearer` takes the mask's place.
    """

    open: Mask  # all tokens behind which there is time to end
    nearer: Mask  # those that lead nearer to the end


class Nearness(NamedTuple):
    """How the limit bears on the next token."""

    is_near: bool  # tokens were taken from its mask because the end is near
    ending: Ending | None = None


class ClosingCompiler:
    """Compiles languages for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, kernels: ModuleType | None) -> None:
        """`kernels`: the native module that follows languages; None: no output is brought to an end."""
        ends = set(vocabulary.eos_token_ids)
        self._native = kernels
        self._ends = packed(ends, vocabulary.size)
        if self._native is not None:
            texts = [b"" if index in ends else token for index, token in enumerate(vocabulary.tokens)]
            self._trie = self._native.Trie.of(texts)

    def translate(self, language: Language) -> bytes:
        """Returns what is `load`ed, in any process; b"" where there are no kernels, or the language is too large."""
        if self._native is None:
            return b""
        try:
            program: bytes = self._native.closing_program(encoded(language, self._native), self._trie)
        except RuntimeError:
            return b""
        return program

    def load(self, program: bytes) -> Closing | None:
        """Makes it ready; None where there is nothing, or no text can be written with these tokens."""
        if self._native is None or not program:
            return None
        try:
            follower = self._native.Follower(program, self._trie)
        except (RuntimeError, ValueError):  # it takes too long to follow, or another version made it
            return None
        if follower.least >= self._native.NEVER:
            return None
        return Closing(follower, self._native.Place, self._ends, len(program))


class Closing:
    """A language whose outputs can be brought to an end. Immutable."""

    def __init__(self, follower: Any, place: Callable[[Any], Any], ends: Mask, num_bytes: int) -> None:
        self.least: int = follower.least  # tokens of an output at least, without one that ends it
        self.num_bytes = num_bytes
        self._follower = follower
        self._place = place
        self._ends = ends

    @property
    def num_walked(self) -> int:
        """Returns how many places of the vocabulary's trie were looked at for all outputs."""
        count: int = self._follower.num_walked
        return count

    def start(self, most: int) -> ClosingPlace:
        """Returns the start of an output with a limit on its tokens."""
        zones = min(WORD_ZONE, most // WORD_SHARE), min(SENTENCE_ZONE, most // SENTENCE_SHARE)
        return ClosingPlace(self._place(self._follower), self._ends, zones)


class ClosingPlace:
    """The place of one output. What the backend has accepted is accepted here too. Not thread-safe."""

    def __init__(self, place: Any, ends: Mask, zones: tuple[int, int]) -> None:
        self.ends = ends  # packed: the tokens that end an output
        self._place = place
        self._zones = zones
        self.accept: Callable[[int], None] = place.accept
        self.rollback: Callable[[int], None] = place.rollback

    @property
    def cost(self) -> int:
        """Returns how many tokens it takes to come to an end; raises GrammarError as `restrict` does."""
        with _following():
            cost: int = self._place.cost()
        return cost

    def restrict(self, mask: Mask, left: int, *, gently: bool) -> Nearness:
        """Takes from a mask the tokens behind which the output could not end within `left` tokens; `gently`: and near
        the end, those that begin another word, or another sentence.

        Raises GrammarError where the language is too complex to follow.
        """
        words, sentences = self._zones if gently else (0, 0)
        with _following():
            nearness: int = self._place.restrict(mask, self.ends, left, words, sentences)
        if nearness < AT_A_WORD:
            return Nearness(bool(nearness))
        ending = Ending(np.empty_like(mask), np.empty_like(mask))
        self._place.endings(ending.open, ending.nearer)
        return Nearness(True, ending)

    def num_closing(self, token_ids: Sequence[int], left: int) -> int:
        """Returns how many of these tokens may follow so that the output can still end within `left` tokens; raises
        GrammarError as `restrict` does."""
        with _following():
            count: int = self._place.num_closing(list(token_ids), left)
        return count


class ClosingGrammar:
    """A compiled grammar whose outputs can be brought to an end, where `closing` is there. Immutable."""

    def __init__(self, compiled: CompiledGrammar, closing: Closing | None) -> None:
        self.closing = closing
        self.compiled = compiled

    @property
    def num_bytes(self) -> int:
        return self.compiled.num_bytes + (0 if self.closing is None else self.closing.num_bytes)

    @property
    def reserve(self) -> int:
        """Returns how many tokens more than `closing` counts an end may take: what a guard asks for is not counted."""
        return self.compiled.reserve if isinstance(self.compiled, GuardedCompiled) else 0

    def start(self) -> Grammar:
        """Returns a grammar at the beginning of an output."""
        return self.compiled.start()


@contextlib.contextmanager
def _following() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GrammarError(f"its ends could not be followed: {error}") from None


def encoded(language: Language, kernels: ModuleType) -> NDArray[np.int32]:
    """Returns a language as the native code reads it: its rules' nodes, the start, then the nodes, parts first. Raises
    RuntimeError where it is nested too deep."""
    tree = kernels.closing_tree(dict(language.rules), language.start, KINDS, _rewritten)
    return np.frombuffer(tree, dtype=np.int32)


def _rewritten(both: Both) -> Expression:
    """Returns an intersection as it is written: without itself where it only leaves out the empty text."""
    if SOMETHING not in (both.first, both.second):
        return both
    item = both.first if both.second == SOMETHING else both.second
    return both if isinstance(item, Both | Not) else nonempty(item)


def nonempty(expression: Expression) -> Expression:
    """Returns a regular expression of the same texts but the empty one, without an intersection where that can be."""
    if not can_be_empty(expression):
        return expression
    match expression:
        case Terminal(item):
            return nonempty(item)
        case Choice(items):
            return choice(nonempty(item) for item in items)
        case Chain(items):
            return choice(chain((nonempty(item), *items[at + 1 :])) for at, item in enumerate(items))
        case Repeat(item, least, most):
            rest = repeat(item, max(least - 1, 0), None if most is None else most - 1)
            return NOTHING if most == 0 else chain((nonempty(item), rest))
        case Both() | Not():
            return Both(expression, SOMETHING)
    return NOTHING
