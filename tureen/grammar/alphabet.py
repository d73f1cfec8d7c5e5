"""The characters of regular expression trees in classes that the trees do not tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tureen.grammar.expression import (
    MAX_CODE_POINT,
    SURROGATES,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    Not,
    Repeat,
    Terminal,
    Text,
)

Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Alphabet:
    """All characters but surrogates, in atoms: no expression at hand tells two characters of one atom apart."""

    atoms: tuple[Ranges, ...]  # sorted ranges of each
    by_char: dict[str, int]  # for every character of a text
    by_ranges: dict[Ranges, frozenset[int]]  # for every class


def alphabet_of(expressions: Iterable[Expression]) -> Alphabet:
    """Returns the coarsest alphabet for these trees."""
    chars, classes = _characters(expressions)
    singles = {ord(char) for char in chars}
    toggles = {0: 0, SURROGATES[0]: 0, SURROGATES[1] + 1: 0, MAX_CODE_POINT + 1: 0}
    for index, ranges in enumerate(classes):
        for first, last in ranges:
            toggles[first] = toggles.get(first, 0) ^ (1 << index)
            toggles[last + 1] = toggles.get(last + 1, 0) ^ (1 << index)
    for point in singles:
        toggles.setdefault(point, 0)
        toggles.setdefault(point + 1, 0)
    ranges_by_key: dict[tuple[int, int], list[tuple[int, int]]] = {}
    points, inside = sorted(toggles), 0
    for point, following in pairwise(points):
        inside ^= toggles[point]
        if not SURROGATES[0] <= point <= SURROGATES[1]:
            ranges_by_key.setdefault((point if point in singles else -1, inside), []).append((point, following - 1))
    members: list[list[int]] = [[] for _ in classes]
    for atom, (_, inside) in enumerate(ranges_by_key):
        while inside:
            members[(inside & -inside).bit_length() - 1].append(atom)
            inside &= inside - 1
    by_char = {chr(point): atom for atom, (point, _) in enumerate(ranges_by_key) if point >= 0}
    by_ranges = {ranges: frozenset(atoms) for ranges, atoms in zip(classes, members, strict=True)}
    return Alphabet(tuple(tuple(ranges) for ranges in ranges_by_key.values()), by_char, by_ranges)


def _characters(expressions: Iterable[Expression]) -> tuple[set[str], list[Ranges]]:
    """The characters of the texts, and the different classes."""
    chars: set[str] = set()
    classes: dict[Ranges, None] = {}
    seen: set[int] = set()
    waiting = list(expressions)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case Text(text):
                chars.update(text)
            case Chars(ranges):
                classes[ranges] = None
            case Chain(items) | Choice(items):
                waiting += items
            case Both(first, second):
                waiting += (first, second)
            case Repeat(item) | Not(item) | Terminal(item):
                waiting.append(item)
    return chars, list(classes)


def merged(spans: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the union of ranges of code points: sorted, disjoint, not adjacent."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)
