"""The grammar that a constrained sequence's output must match, followed token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tureen.errors import InvalidRequest, RequestFailed
from tureen.grammar import Grammar, GrammarError, Mask, Unenforced
from tureen.log import get_logger

log = get_logger("engine")


class Constraint:
    """The grammar of one sequence. EOS is allowed where the grammar accepts; with `avoids_end` only where nothing else
    is."""

    def __init__(
        self,
        grammar: Grammar,
        eos_token_ids: tuple[int, ...],
        *,
        avoids_end: bool,
        field: str = "grammar",
        unenforced: tuple[Unenforced, ...] = (),
    ) -> None:
        """`field`: what the client calls it. `unenforced`: what it says, and the grammar does not keep."""
        self.unenforced = unenforced
        self.num_forced = 0  # output tokens that nobody drew
        self._grammar = grammar
        self._eos_token_ids = eos_token_ids
        self._avoids_end = avoids_end
        self._field = field

    @property
    def is_accepting(self) -> bool:
        """Raises InvalidRequest, RequestFailed."""
        with following(self._field):
            return self._grammar.is_accepting

    @property
    def is_done(self) -> bool:
        """Raises InvalidRequest where it takes too much to tell, RequestFailed."""
        with following(self._field):
            return self._grammar.is_done

    def fill_mask(self, mask: Mask) -> None:
        """Raises GrammarError."""
        self._grammar.fill_mask(mask)
        if self._avoids_end and self._grammar.is_accepting:
            before = mask.copy()
            for token_id in self._eos_token_ids:
                mask[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
            if not mask.any():
                mask[:] = before

    def fill_masks(self, masks: Sequence[Mask], *, guesses: tuple[int, ...] = ()) -> None:
        """Fill a mask for the next token, and one for the token after each guess, which the grammar follows. Raises
        GrammarError."""
        self.fill_mask(masks[0])
        for mask, token_id in zip(masks[1:], guesses, strict=True):
            self._grammar.accept(token_id)
            self.fill_mask(mask)
        if guesses:
            self._grammar.rollback(len(guesses))

    def num_followed(self, guesses: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows one after the other, with a choice behind
        each: where it forces what follows, nothing is drawn. Changes nothing. Raises InvalidRequest, RequestFailed."""
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
        """Go on by a token that was drawn under the mask, or was forced. Raises RequestFailed, InvalidRequest."""
        with following(self._field):
            is_allowed = self._grammar.accept(token_id)
        if not is_allowed:
            raise RequestFailed(
                f"token {token_id} was drawn, but the grammar does not allow it", code="grammar_mismatch"
            )

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model says; to be accepted one by one. Raises InvalidRequest,
        RequestFailed."""
        with following(self._field):
            return self._grammar.forced()


@contextlib.contextmanager
def following(field: str) -> Iterator[None]:
    """A grammar that is too complex to follow is its client's fault; whatever else a library raises ends this request,
    not the engine."""
    try:
        yield
    except GrammarError as error:
        raise too_complex(field, str(error)) from None
    except Exception:
        log.exception("a grammar could not be followed")
        raise RequestFailed(
            f"{field}: the output could not be followed in its grammar; this is a fault of the server",
            code="grammar_failed",
        ) from None


def too_complex(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} is too complex to follow: {why}; make it simpler", field=field, code="grammar_too_complex"
    )
