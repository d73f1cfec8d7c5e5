"""How a sequence's output grows: by a drawn token, and by all that its grammar then leaves no choice about."""

from __future__ import annotations

from tureen.engine import finish
from tureen.engine.sequence import Sequence
from tureen.types import FinishReason


def drawn(sequence: Sequence, token_id: int, *, context_len: int) -> FinishReason | None:
    """Append a token that was drawn, then those that are forced. Why the output ends there; None = it goes on.

    Raises RequestFailed.
    """
    reason = _append(sequence, token_id, context_len, is_drawn=True)
    if reason is not None or sequence.constraint is None:
        return reason
    return forced(sequence, context_len=context_len)


def forced(sequence: Sequence, *, context_len: int) -> FinishReason | None:
    """Append the tokens that the grammar leaves no choice about. Why the output ends there; None = it goes on."""
    if sequence.constraint is None or sequence.request.max_new_tokens == 0:
        return None
    if sequence.constraint.is_done:
        return finish.complete(sequence)
    for token_id in sequence.constraint.forced():
        sequence.constraint.num_forced += 1
        reason = _append(sequence, token_id, context_len, is_drawn=False)
        if reason is not None:
            return reason
    return None


def _append(sequence: Sequence, token_id: int, context_len: int, *, is_drawn: bool) -> FinishReason | None:
    params = sequence.request.params
    stops_allowed = len(sequence.token_ids) - sequence.num_prompt + 1 >= params.min_new_tokens
    is_end = stops_allowed and token_id in sequence.end_token_ids
    constraint = None if is_end else sequence.constraint
    if constraint is not None:
        constraint.accept(token_id)
    stop = None
    if not is_end or params.no_stop_trim:
        stop = sequence.detokenizer.append(token_id, stops_allowed=stops_allowed)
    sequence.append(token_id, is_drawn=is_drawn)
    if stop is None and constraint is not None and constraint.is_done:
        return finish.complete(sequence)
    return finish.reached(sequence, stop=stop, end_token_id=token_id if is_end else None, context_len=context_len)
