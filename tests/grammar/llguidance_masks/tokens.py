"""A vocabulary as sets of tokens, packed as masks are."""

from __future__ import annotations

import numpy as np

from tureen.grammar.base import Vocabulary, packed


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
