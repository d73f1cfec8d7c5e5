"""Masks of guarded grammars, and their judge: all texts of a small language, written out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tureen.grammar import Vocabulary


def allowed(grammar: Any, vocabulary: Vocabulary) -> list[int]:
    """Returns the token ids that may come next."""
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.uint32)
    grammar.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def check_exact(grammar: Any, vocabulary: Vocabulary, texts: Sequence[bytes], dice: random.Random, times: int) -> None:
    """Walks through a compiled grammar at random: a token is allowed exactly where one of the texts goes on with it."""
    [end] = vocabulary.eos_token_ids
    for _ in range(times):
        place, text, rest = grammar.start(), b"", texts
        while True:
            expected = {
                token
                for token, piece in enumerate(vocabulary.tokens)
                if piece and any(each.startswith(text + piece) for each in rest)
            } | ({end} if text in rest else set())
            assert set(allowed(place, vocabulary)) == expected, text
            token = dice.choice(sorted(expected))
            if token == end:
                break
            assert place.accept(token)
            text += vocabulary.tokens[token]
            rest = [each for each in rest if each.startswith(text)]
