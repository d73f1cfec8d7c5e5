"""Follows the languages of what a value can be, byte by byte, where that is not certain from its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from tureen.grammar.base import CompiledGrammar, Grammar, Mask
from tureen.grammar.guard.reader import Taken

MAX_FOLLOWED = 32


class _Followed:
    """A grammar, and the text that it has followed."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.text = b""


class BranchFollower:
    """Follows values of one output in the grammars of branches. They may be asked about in any order: what was read
    before is gone on with."""

    def __init__(self, branches: Sequence[CompiledGrammar], byte_ids: Sequence[int]) -> None:
        """`byte_ids`: the token of each byte."""
        self._branches = branches
        self._byte_ids = byte_ids
        self._followed: dict[Taken, _Followed] = {}

    def fits(self, value: Taken, data: bytearray, end: int) -> bool:
        """Returns whether the text, from where the value begins up to an end, begins one of the branch."""
        text = bytes(data[value.start : end])
        return len(self._at(value, text).text) == len(text)

    def fill_mask(self, value: Taken, data: bytearray, mask: Mask) -> None:
        """Writes the tokens that go on with a value of the branch, or stand behind it."""
        self._at(value, bytes(data[value.start :])).grammar.fill_mask(mask)

    def _at(self, value: Taken, text: bytes) -> _Followed:
        """Follows a text as far as the branch has it."""
        followed = self._followed.pop(value, None) or _Followed(self._branches[value.branch].start())
        self._followed[value] = followed
        if len(self._followed) > MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]
        size = min(len(followed.text), len(text))
        while followed.text[:size] != text[:size]:
            size -= 1
        followed.grammar.rollback(len(followed.text) - size)
        while size < len(text) and followed.grammar.accept(self._byte_ids[text[size]]):
            size += 1
        followed.text = text[:size]
        return followed
