"""The tokens of a text that must come next, as far as their place is certain."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from tureen.grammar.base import Encode, Vocabulary

MAX_BYTES = 512
"""Bytes of a forced text that are looked at in one go: bounds the time that takes. The rest is forced after the next
token."""


class Follows(Protocol):
    """A place in a language that can try a text."""

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...

    @property
    def is_done(self) -> bool: ...


class ForcedText:
    """Makes tokens of text that must come next. Immutable.

    A token is certain if it ends before the first place from which a token of the vocabulary could reach over the end
    of the text, into what follows it. (Where a merge inside of the text depends on what follows, as byte-pair encodings
    allow in principle, the tokens are another way to write the same text.)
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self._texts = vocabulary.tokens
        self._encode = encode
        self._sorted = sorted({token for token in vocabulary.tokens if token})
        self._longest = max(map(len, self._sorted), default=0)

    def tokens(self, text: bytes, place: Follows) -> list[int]:
        """Returns the certain tokens of a text that must come next. Leaves the place unchanged."""
        text = _whole_characters(text[:MAX_BYTES])
        token_ids = self._encode(text.decode())
        if b"".join(map(self._text, token_ids)) != text:
            return []  # the tokenizer writes another text, with a space before it or a special token in it
        num_accepted = 0
        try:
            while num_accepted < len(token_ids) and place.accept(token_ids[num_accepted]):
                num_accepted += 1
            is_done = num_accepted == len(token_ids) and place.is_done
        finally:
            place.rollback(num_accepted)
        if num_accepted < len(token_ids):
            return []
        if not is_done:
            places = range(max(0, len(text) - self._longest), len(text))
            limit = next((at for at in places if self._begun(text[at:])), len(text))
            while token_ids and len(b"".join(map(self._text, token_ids))) > limit:
                token_ids.pop()
        return token_ids

    def _text(self, token_id: int) -> bytes:
        return self._texts[token_id] if token_id < len(self._texts) else b""

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
