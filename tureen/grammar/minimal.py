"""Finds the equal states of a deterministic automaton."""

from __future__ import annotations

from collections.abc import Iterable

MAX_MOVES = 200_000  # of an automaton that is made minimal: about half a second


def minimal(by_atom: list[dict[int, int]], accepting: list[bool], live: set[int]) -> dict[int, int]:
    """Returns the block of each live state; the states of a block are equal.

    A missing move leads nowhere. Hopcroft, "An n log n algorithm for minimizing states in a finite automaton" (1971);
    as in Valmari and Lehtinen (2008) both first blocks are splitters, so that moves may be missing. An automaton of
    more than MAX_MOVES moves is left as it is: each state has its own block.
    """
    if sum(len(by_atom[state]) for state in live) > MAX_MOVES:
        return {state: state for state in live}
    sources: dict[int, dict[int, list[int]]] = {state: {} for state in live}
    for state in live:
        for atom, target in by_atom[state].items():
            sources[target].setdefault(atom, []).append(state)
    ends = {state for state in live if accepting[state]}
    blocks = [block for block in (ends, live - ends) if block]
    block_of = {state: number for number, block in enumerate(blocks) for state in block}
    for block in blocks:  # grows; each is a splitter once, as the smaller part of what it was split from
        for states in _reaching(block, sources):
            _split(states, blocks, block_of)
    return block_of


def _split(states: list[int], blocks: list[set[int]], block_of: dict[int, int]) -> None:
    """Part each block into these states and the others; the smaller part becomes the last block."""
    touched: dict[int, list[int]] = {}
    for state in states:
        touched.setdefault(block_of[state], []).append(state)
    for number, inside in touched.items():
        block = blocks[number]
        if len(inside) == len(block):
            continue
        smaller = set(inside) if 2 * len(inside) <= len(block) else block.difference(inside)
        block -= smaller
        block_of.update(dict.fromkeys(smaller, len(blocks)))
        blocks.append(smaller)


def _reaching(block: Iterable[int], sources: dict[int, dict[int, list[int]]]) -> list[list[int]]:
    """For each letter the states from which it leads into the block."""
    by_atom: dict[int, list[int]] = {}
    for state in block:
        for atom, states in sources[state].items():
            by_atom.setdefault(atom, []).extend(states)
    return list(by_atom.values())
