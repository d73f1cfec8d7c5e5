"""Parts of a language put together, with terminals kept only as long as a lexer cannot be wrong about where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tureen.grammar.expression import EMPTY, Expression, Text
from tureen.grammar.free_text import any_of
from tureen.grammar.rules import can_be_empty, chain, choice, holding, reachable, unmarked


@dataclass(frozen=True, slots=True)
class TerminalPiece:
    """An expression whose terminals may be kept if it is certain where it begins."""

    expression: Expression
    starts: tuple[str, ...] | None = None  # each of its texts begins with one of these; None: not known
    goes_on: str | None = None
    """No text of it begins another one, save where one of these characters follows; None: not known."""


NO_PIECE = TerminalPiece(EMPTY, ("",), "")


def fixed(text: str, piece: TerminalPiece = NO_PIECE) -> TerminalPiece:
    """Returns the piece with a fixed text before it."""
    return TerminalPiece(chain((Text(text), piece.expression)), (text,), piece.goes_on) if text else piece


def apart(texts: Sequence[str]) -> bool:
    """Returns whether none of these begins another one."""
    ordered = sorted(texts)
    return not any(longer.startswith(shorter) for shorter, longer in pairwise(ordered))


class Assembly:
    """Puts pieces together. `rules` are those that their expressions call, each of them called by one piece only."""

    def __init__(self) -> None:
        self.rules: dict[str, Expression] = {}

    def without_terminals(self, piece: TerminalPiece) -> TerminalPiece:
        """Returns a piece of the same language without terminals."""
        for name, rule in reachable(piece.expression, self.rules).items():
            self.rules[name] = unmarked(rule)
        return TerminalPiece(unmarked(piece.expression))

    def can_be_empty(self, piece: TerminalPiece) -> bool:
        """Returns whether the empty string is one of its texts."""
        return can_be_empty(piece.expression, holding(reachable(piece.expression, self.rules), can_be_empty))

    def joined(self, pieces: Iterable[TerminalPiece]) -> TerminalPiece:
        """Joins pieces one after the other, without terminals from the first of them on whose end is not certain."""
        kept = [piece for piece in pieces if piece is not NO_PIECE]
        for at in range(len(kept) - 1):
            if not _end_is_certain(kept[at], kept[at + 1]):
                kept[at:] = [self.without_terminals(piece) for piece in kept[at:]]
                break
        if len(kept) < 2:
            return kept[0] if kept else NO_PIECE
        return TerminalPiece(chain(piece.expression for piece in kept), kept[0].starts, kept[-1].goes_on)

    def either(self, pieces: Sequence[TerminalPiece]) -> TerminalPiece:
        """Returns any of the pieces, without terminals if their first characters do not show which one it is."""
        if len(pieces) == 1:
            return pieces[0]
        known = [start for piece in pieces for start in piece.starts or ()]
        starts = None if any(piece.starts is None for piece in pieces) else tuple(known)
        if starts is None or not apart(starts):
            pieces = [self.without_terminals(piece) for piece in pieces]
        goes_on = [piece.goes_on for piece in pieces if piece.goes_on is not None]
        certain = len(goes_on) == len(pieces)
        return TerminalPiece(
            choice(piece.expression for piece in pieces), starts, "".join(goes_on) if certain else None
        )

    def ended(self, piece: TerminalPiece, ends: Sequence[str]) -> TerminalPiece:
        """Returns the piece with one of these fixed texts after it; with nothing if there are none."""
        return (
            self.joined((piece, TerminalPiece(any_of(ends), tuple(ends), "" if apart(ends) else None)))
            if ends
            else piece
        )


def _end_is_certain(first: TerminalPiece, second: TerminalPiece) -> bool:
    if not first.goes_on:
        return first.goes_on is not None
    return second.starts is not None and not any(start == "" or start[0] in first.goes_on for start in second.starts)
