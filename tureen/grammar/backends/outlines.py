"""The backend that uses outlines_core: a finite automaton whose moves are tokens, so only regular languages.

Its index takes long to build, and has a binary form of its own: that is what a translation is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import outlines_core
from numpy.typing import NDArray

from tureen.grammar.backends.forced import MAX_BYTES, ForcedText
from tureen.grammar.backends.patterns import pattern
from tureen.grammar.backends.terminals import flat_rules, pruned
from tureen.grammar.backends.tokens import TokenSets
from tureen.grammar.base import Encode, Mask, Vocabulary
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
    Text,
)
from tureen.grammar.regular import automaton, expression_of
from tureen.grammar.rules import calls, cycle, replaced, unmarked

MAX_PARTS = 20_000
MAX_STATES = 5_000
MAX_INDEX_BYTES = 48 << 20
BEGIN = "\0"
"""Comes before every text, and is in none.

The library builds, beside the automaton that it needs, the one that looks for a match anywhere in a text. That one can
be of exponential size, unless a match can only begin where there is something that is nowhere else.
"""

MAX_ROLLBACK = 64  # tokens
MAX_FORCED_WAYS = 64
"""Tokens that can be next where a text is forced: those that begin it."""


class OutlinesBackend:
    """outlines_core for one vocabulary."""

    is_bounded = False

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.vocabulary = vocabulary
        self._tokens = TokenSets(vocabulary)
        self._forced_text = ForcedText(vocabulary, encode)
        ids: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.tokens):
            if self._tokens.is_text(token_id):
                ids.setdefault(token, []).append(token_id)
        end_id, self._begin_id = self._tokens.count, self._tokens.count + 1  # none of the model's
        ids.setdefault(BEGIN.encode(), []).append(self._begin_id)
        self._vocabulary = outlines_core.Vocabulary(end_id, ids)

    def translate(self, language: Language) -> bytes:
        """Returns the index in its binary form. Raises GrammarError."""
        # \z: of alternatives the library takes the first one that fits, not the longest
        expression = plain(language)
        automaton(expression, MAX_STATES)  # refuse what the library would work on for hours
        written = pattern(Chain((Text(BEGIN), expression))) + r"\z"
        try:
            index = outlines_core.Index(written, self._vocabulary)
        except ValueError as error:
            raise GrammarError(f"too complex for --grammar-backend outlines: {str(error)[:200]}") from None
        data: bytes = index.__reduce__()[1][0]
        if len(data) > MAX_INDEX_BYTES:
            raise GrammarError(
                f"too large for --grammar-backend outlines: its index takes {len(data) >> 20} MiB; at most "
                f"{MAX_INDEX_BYTES >> 20}; make bounds on lengths and counts smaller, or use llguidance or xgrammar"
            )
        return data

    def load(self, source: bytes) -> OutlinesCompiled:
        """Reads the index. Raises GrammarError."""
        try:
            index = outlines_core.Index.from_binary(source)
        except ValueError as error:
            raise GrammarError(f"not an index of outlines: {str(error)[:200]}") from None
        state = index.get_next_state(index.get_initial_state(), self._begin_id)
        if state is None:
            raise GrammarError("no text at all fits")
        return OutlinesCompiled(Walk(index, self._tokens, state), self._begin_id, self._forced_text, len(source))


class OutlinesCompiled:
    """An index and its first state."""

    def __init__(self, start: Walk, begin_id: int, forced_text: ForcedText, source_bytes: int) -> None:
        self._start = start
        self._begin_id = begin_id
        self._forced_text = forced_text
        self._source_bytes = source_bytes

    @property
    def num_bytes(self) -> int:
        """Its hash tables take about twice what the binary form does."""
        return 10_000 + 2 * self._source_bytes

    def start(self) -> OutlinesGrammar:
        return OutlinesGrammar(replace(self._start), self._begin_id, self._forced_text)


@dataclass
class Walk:
    """A state of an index, and the states after it."""

    index: outlines_core.Index
    tokens: TokenSets
    state: int

    def accept(self, token_id: int) -> bool:
        following = self.index.get_next_state(self.state, token_id) if self.tokens.is_text(token_id) else None
        if following is None:
            return False
        self.state = following
        return True

    @property
    def is_accepting(self) -> bool:
        return bool(self.index.is_final_state(self.state))

    @property
    def is_done(self) -> bool:
        return self.is_accepting and not any(map(self.tokens.is_text, self.index.get_allowed_tokens(self.state)))

    def ways(self) -> dict[bytes, int]:
        """Returns the tokens that may come next."""
        ids = filter(self.tokens.is_text, self.index.get_allowed_tokens(self.state))
        return {self.tokens.bytes_of([token_id]): token_id for token_id in ids}


class OutlinesGrammar:
    """A state of an index, with its mask."""

    def __init__(self, walk: Walk, begin_id: int, forced_text: ForcedText) -> None:
        self._walk = walk
        self._before: list[int] = []  # the state before each token
        self._guide = outlines_core.Guide(walk.index, MAX_ROLLBACK)
        self._guide.advance(begin_id, False)
        self._forced_text = forced_text
        self._mask: NDArray[np.uint32] | None = None  # of this state, without EOS

    def fill_mask(self, mask: Mask) -> None:
        mask[:] = self._allowed()
        if self.is_accepting:
            mask |= self._walk.tokens.ends

    def accept(self, token_id: int) -> bool:
        before = self._walk.state
        if not self._walk.accept(token_id):
            return False
        self._before.append(before)
        self._guide.advance(token_id, False)
        self._mask = None
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._walk.state = self._before[-num_tokens]
            del self._before[-num_tokens:]
            self._guide.rollback_state(num_tokens)
            self._mask = None

    def forced(self) -> list[int]:
        if np.unpackbits(self._allowed().view(np.uint8)).sum() > MAX_FORCED_WAYS:
            return []
        ahead, text = replace(self._walk), b""
        while len(text) < MAX_BYTES and not ahead.is_accepting:
            ways = ahead.ways()
            start = _common_start(ways)
            text += start
            if start not in ways:
                break
            ahead.accept(ways[start])
        return self._forced_text.tokens(text, replace(self._walk)) if text else []

    @property
    def is_accepting(self) -> bool:
        return self._walk.is_accepting

    @property
    def is_done(self) -> bool:
        return self.is_accepting and not self._allowed().any()

    def _allowed(self) -> NDArray[np.uint32]:
        if self._mask is None:
            tokens = self._walk.tokens
            row = np.zeros(max((tokens.count + 1) // 32 + 1, tokens.words), dtype=np.uint32)
            self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
            self._mask = row[: tokens.words] & tokens.texts
        return self._mask


def _common_start(texts: Collection[bytes]) -> bytes:
    first, last = min(texts), max(texts)
    same = next((at for at, (low, high) in enumerate(zip(first, last, strict=False)) if low != high), len(first))
    return first[:same]


def plain(language: Language) -> Expression:
    """Returns the language as an expression without calls, marks, Both, Not and BEGIN.

    Raises GrammarError when it is not regular, or too large.
    """
    language = pruned(language)
    rules = {name: unmarked(rule) for name, rule in language.rules.items()}
    circle = cycle({name: list(calls(rule)) for name, rule in rules.items()})
    if circle is not None:
        raise GrammarError(
            f"--grammar-backend outlines has no recursion, and this nests without end ({' → '.join(circle[:5])}); "
            "use --grammar-backend llguidance or xgrammar"
        )
    flat = flat_rules(rules, MAX_PARTS)
    if len(flat) < len(rules):
        raise GrammarError(
            f"too large for --grammar-backend outlines: its rules written out take more than {MAX_PARTS} parts, or "
            "nest too deep; use --grammar-backend llguidance or xgrammar"
        )
    written = replaced(unmarked(language.start), flat.__getitem__)
    return pruned(Language(_without_begin(_without_sets(written)))).start


def _without_begin(expression: Expression) -> Expression:
    match expression:
        case Text(text):
            return NOTHING if BEGIN in text else expression
        case Chars(ranges) if ranges and ranges[0][0] == 0:
            return Chars(((1, ranges[0][1]), *ranges[1:]) if ranges[0][1] else ranges[1:])
        case Chain(items):
            return Chain(tuple(_without_begin(item) for item in items))
        case Choice(items):
            return Choice(tuple(_without_begin(item) for item in items))
        case Repeat(item, least, most):
            return Repeat(_without_begin(item), least, most)
    return expression


def _without_sets(expression: Expression) -> Expression:
    match expression:
        case Both() | Not():
            return expression_of(automaton(expression))
        case Chain(items):
            return Chain(tuple(_without_sets(item) for item in items))
        case Choice(items):
            return Choice(tuple(_without_sets(item) for item in items))
        case Repeat(item, least, most):
            return Repeat(_without_sets(item), least, most)
    return expression
