"""The tokens of a text that must come next, as far as their place is certain."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from tureen.grammar.backends.tokens import TokenSets
from tureen.grammar.base import Encode, Vocabulary

MAX_BYTES = 512
"""Bytes of a forced text that are looked at in one go: bounds the time that takes. The rest is forced after the next
token."""


class Trial(Protocol):
    """A copy of a grammar, as far as it is tried out."""

    def accept(self, token_id: int) -> bool: ...

    @property
    def is_done(self) -> bool: ...


class ForcedText:
    """Makes tokens of text that must come next. Immutable.

    A token is certain if it ends before the first place from which a token of the vocabulary could reach over the end
    of the text, into what follows it. (Where a merge inside of the text depends on what follows, as byte-pair encodings
    allow in principle, the tokens are another way to write the same text.)
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self._tokens = TokenSets(vocabulary)
        self._encode = encode
        self._sorted = sorted({token for token in vocabulary.tokens if token})
        self._longest = max(map(len, self._sorted), default=0)

    def tokens(self, text: bytes, trial: Trial) -> list[int]:
        """Returns the certain tokens of a text that comes next. `trial` is a copy of the grammar there, to be used
        up."""
        text = _whole_characters(text[:MAX_BYTES])
        token_ids = self._encode(text.decode())
        if not all(map(self._tokens.is_text, token_ids)) or self._tokens.bytes_of(token_ids) != text:
            return []  # the tokenizer writes another text, with a space before it or a special token in it
        if not all(map(trial.accept, token_ids)):
            return []
        if not trial.is_done:
            places = range(max(0, len(text) - self._longest), len(text))
            limit = next((at for at in places if self._begun(text[at:])), len(text))
            while token_ids and len(self._tokens.bytes_of(token_ids)) > limit:
                token_ids.pop()
        return token_ids

    def _begun(self, start: bytes) -> bool:
        """A token begins with these bytes and has more."""
        at = bisect_right(self._sorted, start)
        return at < len(self._sorted) and self._sorted[at].startswith(start)


def _whole_characters(text: bytes) -> bytes:
    """Up to what is no complete character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text
