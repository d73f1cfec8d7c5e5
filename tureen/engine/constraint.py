"""The grammar that a constrained sequence's output must match, followed token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from tureen.errors import InvalidRequest, RequestFailed
from tureen.grammar import Grammar, GrammarError, Mask, Unenforced
from tureen.grammar.base import Ending, Nearness, Zones, packed
from tureen.grammar.follower import zones_of
from tureen.grammar.shortest_completion import way_out
from tureen.log import get_logger

AWAY = Nearness(False)
FAR_FROM_END = 64  # with this many spare tokens, closing changes no mask

log = get_logger("engine")


class Constraint:
    """The grammar of one sequence.

    The mask allows EOS where the grammar accepts; with `avoids_end`, only where nothing else is allowed.
    """

    def __init__(
        self,
        grammar: Grammar,
        ends: Mask,
        *,
        avoids_end: bool,
        field: str = "grammar",
        most: int | None = None,
        reserve: int = 0,
        unenforced: tuple[Unenforced, ...] = (),
    ) -> None:
        """`ends`: the tokens that end an output. `field`: the client's name of the constraint. `most`: the number of
        tokens within which the output is closed; None: it is not closed. `reserve`: tokens that a completion may take
        beyond those that the grammar counts. `unenforced`: the parts of the constraint that the grammar lacks."""
        self.unenforced = unenforced
        self._reserve = reserve
        self.num_forced = 0  # output tokens that were not drawn
        self.is_closed_early = False  # the limit of the output restricted its tokens
        self.closes = most is not None  # from each position, the output can be completed within the rest of its limit
        self._zones = Zones() if most is None or avoids_end else zones_of(most)
        self._is_near: list[bool] = []  # whether the end is near, for each of the next tokens
        self._grammar = grammar
        self._ends = ends
        self._avoids_end = avoids_end
        self._field = field

    @property
    def is_accepting(self) -> bool:
        """Returns whether the output may end here. Raises InvalidRequest, RequestFailed."""
        with following(self._field):
            return self._grammar.is_accepting

    @property
    def is_done(self) -> bool:
        """Returns whether the output must end here. Raises InvalidRequest if finding out takes too long,
        RequestFailed."""
        with following(self._field):
            return self._grammar.is_done

    @property
    def is_whole(self) -> bool:
        """Returns whether an output that reaches its limit here is complete. In free text, which never ends by itself,
        it is not. Raises InvalidRequest, RequestFailed."""
        with following(self._field):
            return self.closes and self._grammar.is_accepting and not self._grammar.is_free

    def fill_mask(self, mask: Mask, left: int) -> Nearness:
        """Fills the mask for the next token, with `left` tokens left. Raises GrammarError."""
        self._grammar.fill_mask(mask)
        nearness = self._restrict(mask, left) if self.closes else AWAY
        if self._avoids_end and self._grammar.is_accepting:
            going_on = mask & ~self._ends
            if going_on.any():
                mask[:] = going_on
        return nearness

    def _restrict(self, mask: Mask, left: int) -> Nearness:
        """Removes the tokens after which the output could not be completed in time. If a guard forbids all others,
        keeps the next token of a completion."""
        if not self._reserve:
            return self._grammar.restrict(mask, left, self._zones)
        most = left - self._reserve
        if most < 1 and self._grammar.is_free:
            most = 1  # the free text continues, and begins nothing that must be closed
        if self._grammar.cost <= most:
            kept = mask.copy()
            nearness = self._grammar.restrict(kept, most, self._zones)
            if kept.any():
                mask[:] = kept
                return Nearness(nearness.is_near)
        way = None if self._avoids_end else way_out(self._grammar, self._ends, left)
        if way is not None:
            mask &= packed(way[:1], 32 * len(mask)) if way else self._ends
        return Nearness(is_near=True)

    def fill_masks(self, masks: Sequence[Mask], *, left: int, guesses: tuple[int, ...] = ()) -> Sequence[Ending | None]:
        """Fills a mask for the next token, and one for the token after each guess, which the grammar accepts. Returns
        the ending of each mask. Raises GrammarError."""
        places = [self.fill_mask(masks[0], left)]
        for number, (mask, token_id) in enumerate(zip(masks[1:], guesses, strict=True), 1):
            self._grammar.accept(token_id)
            places.append(self.fill_mask(mask, left - number))
        if guesses:
            self._grammar.rollback(len(guesses))
        self._is_near = [place.is_near for place in places]
        return [place.ending for place in places]

    def look_ahead(self, left: int) -> None:
        """Apply the side effects of filling a mask, for a token that another engine drew. Raises InvalidRequest,
        RequestFailed."""
        self._is_near = []
        if not self.closes or self.is_closed_early:
            return
        with following(self._field):
            if left - self._reserve - self._grammar.cost <= FAR_FROM_END:
                self._is_near = [self.fill_mask(np.zeros_like(self._ends), left).is_near]

    def note_drawn(self) -> None:
        """Called when the next token was drawn, with the first filled mask that has no token yet."""
        if self._is_near and self._is_near.pop(0):
            self.is_closed_early = True

    def num_followed(self, guesses: Sequence[int]) -> int:
        """Returns the number of guesses, from the first on, that the grammar allows in sequence. Changes nothing.

        A guess counts only if the grammar leaves a choice after it. A forced token is not drawn, so no guess can be
        verified there. Raises InvalidRequest, RequestFailed.
        """
        num_accepted = num_followed = 0
        with following(self._field):
            for token_id in guesses:
                if not self._grammar.accept(token_id):
                    break
                num_accepted += 1
                if self._grammar.is_done or self._grammar.forced():
                    break
                num_followed += 1
            if num_accepted:
                self._grammar.rollback(num_accepted)
        return num_followed

    def accept(self, token_id: int) -> None:
        """Advances the grammar by a token that was drawn under the mask, or was forced. Raises RequestFailed,
        InvalidRequest."""
        with following(self._field):
            is_allowed = self._grammar.accept(token_id)
        if not is_allowed:
            raise RequestFailed(
                f"token {token_id} was drawn, but the grammar does not allow it", code="grammar_mismatch"
            )

    def forced(self, left: int) -> list[int]:
        """Returns the forced tokens that follow, to be accepted one by one. Near the limit, returns only as many as
        leave room for a completion, because they may be longer than the shortest tokens of their text. Raises
        InvalidRequest, RequestFailed."""
        with following(self._field):
            token_ids = self._grammar.forced()
            if self.closes and token_ids:
                del token_ids[self._grammar.num_closing(token_ids, left) :]
            return token_ids


@contextlib.contextmanager
def following(field: str) -> Iterator[None]:
    """Turns an exception of a grammar into an error of this request: InvalidRequest if the grammar is too complex to
    follow, RequestFailed for any other exception of its library. The engine continues."""
    try:
        yield
    except GrammarError as error:
        raise too_complex(field, str(error)) from None
    except Exception:
        log.exception("an output could not be matched against its grammar")
        raise RequestFailed(
            f"{field}: the output does not match its grammar; this is a fault of the server",
            code="grammar_failed",
        ) from None


def too_complex(field: str, why: str) -> InvalidRequest:
    """Returns the error for a grammar that cannot be followed further; field: the client's name for it."""
    return InvalidRequest(
        f"{field} is too complex to follow: {why}; make it simpler", field=field, code="grammar_too_complex"
    )
