"""Finds how an output that is guarded comes to its end: what a guard forbids, closing does not know."""

from __future__ import annotations

import numpy as np

from tureen.grammar.base import Grammar, Mask, Zones
from tureen.grammar.guard.guarded import GuardedGrammar

MAX_LENGTH = 1000  # tokens of a way that need not be the shortest
MAX_TRIED, MAX_PLACES = 8000, 800
"""The most tokens tried and masks filled in search of the shortest way. They take about 0.1 s, and up to 0.4 s with a
vocabulary of 49,000 tokens. If they are not enough, some way is taken."""
MAX_OPTIONS = 12
"""The tokens of equal cost that are tried at one place: all digits, and enough letters for one that makes a
difference."""
MAX_COSTS = 4
"""The costs that are tried at one place: the lowest ones."""


def way_out(grammar: Grammar, ends: Mask, most: int) -> list[int] | None:
    """Returns at most `most` tokens after which the output can end; None where none were found. Changes nothing.
    `ends`: the tokens that end an output.

    It is the shortest way, or one that always goes on with a token that leads as near to the end as one that the guard
    allows can: so from each place on the way at least the rest of the same way is found. Raises GrammarError.
    """
    try:
        shortest = _shortest(grammar, ends, most)
    except TimeoutError:
        return _some(grammar, ends, most)
    return shortest


def _shortest(grammar: Grammar, ends: Mask, most: int) -> list[int] | None:
    """Returns the shortest way; None where all are longer than `most`. Raises TimeoutError where that takes too long to
    find out."""
    if _ends(grammar):
        return []
    tried = places = 0
    for limit in range(max(grammar.cost, 1), most + 1):  # without a guard it takes as many as closing counts
        way: list[int] = []
        waiting = [_next(grammar, ends, limit)]
        try:
            while waiting:
                if not waiting[-1]:
                    waiting.pop()
                    if way:
                        way.pop()
                        grammar.rollback(1)
                    continue
                token_id = waiting[-1].pop()
                tried += 1
                if tried > MAX_TRIED or places > MAX_PLACES:
                    raise TimeoutError
                if not grammar.accept(token_id):
                    continue
                way.append(token_id)
                if _ends(grammar):
                    return way.copy()
                left = limit - len(way)
                is_open = grammar.cost <= left
                waiting.append(_next(grammar, ends, left) if is_open else [])
                places += is_open
        finally:
            grammar.rollback(len(way))
    return None


def _next(grammar: Grammar, ends: Mask, left: int) -> list[int]:
    """Returns the tokens that may come next on a way of at most `left`; the last one is tried first."""
    mask = np.zeros_like(ends)
    grammar.fill_mask(mask)
    known = grammar.nearer() if isinstance(grammar, GuardedGrammar) else []
    nearer = next(([token] for token in known if _has(mask, token)), None)
    if nearer is not None:
        return nearer
    mask &= ~ends
    ids: list[int] = []
    for bound in range(grammar.cost, min(left, grammar.cost + MAX_COSTS - 1) + 1):
        near = np.full_like(mask, 0xFFFFFFFF)
        grammar.restrict(near, bound, Zones())  # all that end within this bound
        ids += _ids(mask & near)[:MAX_OPTIONS]
        mask &= ~near
    return ids[::-1]


def _ids(mask: Mask) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def _some(grammar: Grammar, ends: Mask, most: int) -> list[int] | None:
    way: list[int] = []
    mask = np.zeros_like(ends)
    try:
        while not grammar.is_accepting:
            if len(way) >= min(most, MAX_LENGTH):
                return None
            grammar.fill_mask(mask)
            known = grammar.nearer() if isinstance(grammar, GuardedGrammar) else []
            token_id = next((token for token in known if _has(mask, token)), None)
            if token_id is None:
                token_id = _nearest(mask & ~ends, grammar, most - len(way))
            if token_id is None or not grammar.accept(token_id):
                return None
            way.append(token_id)
        return way
    finally:
        grammar.rollback(len(way))


def _ends(grammar: Grammar) -> bool:
    return grammar.is_accepting


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & 1)


def _nearest(mask: Mask, grammar: Grammar, most: int) -> int | None:
    for left in range(grammar.cost, most + 1):
        kept = mask.copy()
        grammar.restrict(kept, left, Zones())
        if kept.any():
            word = int(np.flatnonzero(kept)[0])
            bits = int(kept[word])
            return word * 32 + (bits & -bits).bit_length() - 1
    return None
