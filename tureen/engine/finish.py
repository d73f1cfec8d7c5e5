"""Decides how a request ends. `reached` is the only function that decides whether its output is complete."""

from __future__ import annotations

from tureen.contract.runner import RowError
from tureen.contract.types import FinishReason
from tureen.engine.repetition import Repetition
from tureen.engine.sequence import Sequence
from tureen.errors import TryLater, TureenError

REPETITION_DETECTED = "repetition_detected"
"""The `matched` of an output that repeats itself, as in vLLM."""


def reached(
    sequence: Sequence, *, context_len: int, stop: str | None = None, end_token_id: int | None = None
) -> FinishReason | None:
    """Returns the finish reason if the output ends after its newest token, else None. Raises InvalidRequest,
    RequestFailed.

    The reasons, in order of precedence: stop string, end token, length, end of the context, repetition. stop: the stop
    string that the detokenizer matched. end_token_id: the newest token, if it is an end token and may end the output.
    """
    if stop is not None:
        return FinishReason(type="stop", matched=stop, pattern=sequence.detokenizer.stop_pattern)
    if end_token_id is not None:
        return FinishReason(type="stop", matched=end_token_id, closed_early=_is_closed_early(sequence))
    if len(sequence.token_ids) >= min(sequence.terms.max_tokens, context_len):
        if sequence.constraint is not None and sequence.constraint.is_whole:
            return FinishReason(type="stop", matched=sequence.token_ids[-1], closed_early=True)
        return FinishReason(type="length", length=sequence.num_output)
    if sequence.asked.repetition is not None and _repeats(sequence, sequence.asked.repetition):
        return FinishReason(type="stop", matched=REPETITION_DETECTED, reason="repetition")
    return None


def _repeats(sequence: Sequence, repetition: Repetition) -> bool:
    """Returns whether the output repeats itself as its request defines it, and may end."""
    is_there = repetition.ends(sequence.token_ids, sequence.terms.num_prompt)
    return is_there and sequence.num_output >= sequence.request.params.min_new_tokens


def complete(sequence: Sequence) -> FinishReason:
    """Returns the finish reason of an output that matches its grammar and can only end."""
    matched = sequence.token_ids[-1] if sequence.num_output else None
    return FinishReason(type="stop", matched=matched, closed_early=_is_closed_early(sequence))


def _is_closed_early(sequence: Sequence) -> bool:
    return sequence.constraint is not None and sequence.constraint.is_closed_early


def aborted(reason: str) -> FinishReason:
    """Returns the finish reason of an aborted request."""
    return FinishReason(type="abort", message="Aborted", reason=reason)


def failed(error: TureenError) -> FinishReason:
    """Returns the finish reason that the client of a refused or failed request gets."""
    return FinishReason(
        type="error",
        message=error.message,
        status=error.status,
        code=error.code,
        field=error.field,
        retry_after_s=error.retry_after_s if isinstance(error, TryLater) else None,
    )


def row_failed(error: RowError) -> FinishReason:
    """Returns the finish reason of a request whose row failed in a step."""
    message = error.message or f"the model failed on this request ({error.code}); other requests continue"
    return FinishReason(
        type="error",
        message=message,
        status=error.status,
        code=error.code,
        field=error.field,
        retry_after_s=error.retry_after_s,
    )
