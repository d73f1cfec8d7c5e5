"""The grammar that a constrained sequence's output must match, followed token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tureen.errors import InvalidRequest, RequestFailed
from tureen.grammar import Grammar, GrammarError, Mask
from tureen.log import get_logger

log = get_logger("engine")


class Constraint:
    """The grammar of one sequence.

    The mask allows EOS where the grammar accepts; with `avoids_end`, only where nothing else is allowed.
    """

    def __init__(
        self, grammar: Grammar, eos_token_ids: tuple[int, ...], *, avoids_end: bool, field: str = "grammar"
    ) -> None:
        """`field`: the name that errors have for the constraint, as the client sent it."""
        self.num_forced = 0  # output tokens that nobody drew
        self._grammar = grammar
        self._eos_token_ids = eos_token_ids
        self._avoids_end = avoids_end
        self._field = field

    @property
    def is_accepting(self) -> bool:
        """Says whether the output may end here. Raises InvalidRequest, RequestFailed."""
        with following(self._field):
            return self._grammar.is_accepting

    @property
    def is_done(self) -> bool:
        """Says whether the output can only end here. Raises InvalidRequest where that takes too much to tell,
        RequestFailed."""
        with following(self._field):
            return self._grammar.is_done

    def fill_mask(self, mask: Mask) -> None:
        """Writes the tokens that may come next into `mask`, a bit for each. Raises GrammarError."""
        self._grammar.fill_mask(mask)
        if self._avoids_end and self._grammar.is_accepting:
            before = mask.copy()
            for token_id in self._eos_token_ids:
                mask[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
            if not mask.any():
                mask[:] = before

    def fill_masks(self, masks: Sequence[Mask], *, guesses: tuple[int, ...] = ()) -> None:
        """Fills one mask for the next token and one for the token after each guess. The grammar stays where it was.

        The guesses must be among those that `num_followed` counts. Raises GrammarError.
        """
        self.fill_mask(masks[0])
        for mask, token_id in zip(masks[1:], guesses, strict=True):
            self._grammar.accept(token_id)
            self.fill_mask(mask)
        if guesses:
            self._grammar.rollback(len(guesses))

    def num_followed(self, guesses: Sequence[int]) -> int:
        """Returns how many of these guesses, from the first on, the grammar allows one after the other. Changes
        nothing.

        A guess counts only where the grammar leaves a choice after it: a token that is forced is not drawn, so nothing
        could be guessed for it. Raises InvalidRequest, RequestFailed.
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

    def forced(self) -> list[int]:
        """Returns the tokens that come next whatever the model says. The caller accepts them one by one.

        Raises InvalidRequest, RequestFailed.
        """
        with following(self._field):
            return self._grammar.forced()


@contextlib.contextmanager
def following(field: str) -> Iterator[None]:
    """Turns what a grammar raises into an error of this request: InvalidRequest where it is too complex to follow,
    RequestFailed for whatever else its library raises. The engine goes on."""
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
    """Returns the error for a grammar that cannot be followed further; field: the client's name for it."""
    return InvalidRequest(
        f"{field} is too complex to follow: {why}; make it simpler", field=field, code="grammar_too_complex"
    )
