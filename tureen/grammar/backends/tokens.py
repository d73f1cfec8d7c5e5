"""A vocabulary as sets of tokens, packed as masks are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tureen.grammar.base import Mask, Vocabulary


class TokenSets:
    """The ids that are text and those that end the output. Immutable."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ends = set(vocabulary.eos_token_ids)
        self._texts = list(vocabulary.tokens)
        self.count = len(self._texts)
        for index in ends:
            if index < self.count:
                self._texts[index] = b""
        self.words = -(-vocabulary.size // 32)
        self.ends = packed(ends, vocabulary.size)
        self.texts = packed(np.flatnonzero(np.fromiter(map(bool, self._texts), bool, self.count)), vocabulary.size)

    def is_text(self, token_id: int) -> bool:
        """Returns whether the token stands for bytes."""
        return 0 <= token_id < len(self._texts) and bool(self._texts[token_id])

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Returns the bytes of tokens that are text."""
        return b"".join([self._texts[token_id] for token_id in token_ids])


def packed(token_ids: Iterable[int] | NDArray[np.intp], size: int) -> Mask:
    """Returns [ceil(size / 32)], in which the bits of these tokens are 1."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[token_ids if isinstance(token_ids, np.ndarray) else list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
