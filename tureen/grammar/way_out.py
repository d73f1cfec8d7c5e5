"""Finds how an output that is guarded comes to its end: what a guard forbids, closing does not know."""

from __future__ import annotations

import numpy as np

from tureen.grammar.base import Grammar, Mask
from tureen.grammar.closing import ClosingPlace
from tureen.grammar.guard.guarded import GuardedGrammar


def way_out(grammar: Grammar, place: ClosingPlace, most: int) -> list[int] | None:
    """Returns tokens, at most so many, behind which the output can end; None where none were found. Changes nothing.

    It always takes a token that leads as near to the end as one that the guard allows can, so that from each place on
    the way it finds the rest of the same way. Raises GrammarError.
    """
    way: list[int] = []
    mask = np.zeros_like(place.ends)
    try:
        while not grammar.is_accepting:
            if len(way) >= most:
                return None
            grammar.fill_mask(mask)
            known = grammar.nearer() if isinstance(grammar, GuardedGrammar) else []
            token_id = next((token for token in known if _has(mask, token)), None)
            if token_id is None:
                token_id = _nearest(mask & ~place.ends, place, most - len(way))
            if token_id is None or not grammar.accept(token_id):
                return None
            place.accept(token_id)
            way.append(token_id)
        return way
    finally:
        grammar.rollback(len(way))
        place.rollback(len(way))


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & 1)


def _nearest(mask: Mask, place: ClosingPlace, most: int) -> int | None:
    for left in range(place.cost, most + 1):
        kept = mask.copy()
        place.restrict(kept, left, gently=False)
        if kept.any():
            word = int(np.flatnonzero(kept)[0])
            bits = int(kept[word])
            return word * 32 + (bits & -bits).bit_length() - 1
    return None
