"""Compiled grammars, and why others could not be compiled, by constraint: the least recently used go first."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from tureen.grammar import CompiledGrammar, GrammarSpec, Unenforced
from tureen.grammar_service.messages import Failure

OVERHEAD_BYTES = 1024
"""Bytes of an entry beside its texts and the size that the grammar tells."""


class Ready(NamedTuple):
    """A compiled constraint, with what it says and the grammar does not enforce."""

    grammar: CompiledGrammar
    unenforced: tuple[Unenforced, ...] = ()


Result = Ready | Failure


class CacheEntry(NamedTuple):
    """A grammar, or why there is none, with the memory it takes and the time until which it is kept."""

    result: Result
    num_bytes: int
    until_s: float


class Cache:
    """Bounded by bytes; only in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSpec, CacheEntry] = OrderedDict()
        self.num_bytes = 0

    def get(self, spec: GrammarSpec, now_s: float) -> Result | None:
        """Returns what is kept for a constraint, and counts it as used; None where there is nothing, or no more."""
        entry = self._entries.get(spec)
        if entry is None:
            return None
        if entry.until_s < now_s:
            self._drop(spec)
            return None
        self._entries.move_to_end(spec)
        return entry.result

    def put(self, spec: GrammarSpec, result: Result, num_bytes: int, until_s: float = math.inf) -> None:
        """`num_bytes`: of the result. What is larger than the whole cache is not kept."""
        self._drop(spec)
        num_bytes += OVERHEAD_BYTES + 4 * (len(spec.text) + len(spec.after))  # a character takes up to four bytes
        if num_bytes > self._max_bytes:
            return
        self._entries[spec] = CacheEntry(result, num_bytes, until_s)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, spec: GrammarSpec) -> None:
        entry = self._entries.pop(spec, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
