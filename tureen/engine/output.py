"""Appends drawn and forced tokens to a sequence's output, and decides which part of it is sent."""

from __future__ import annotations

import msgspec

from tureen.contract.runner import NOTHING_TO_DRAW, RowError
from tureen.contract.types import Explanation, FinishReason, OutputDelta, Usage
from tureen.engine import finish
from tureen.engine.constraint import Constraint
from tureen.engine.sequence import Sequence
from tureen.errors import InvalidRequest

NOT_CLOSED = "close_early: this constraint's outputs cannot be completed with the tokens of this model"
"""Entry in the list of unenforced parts for an output that its limit cut, because it could not be completed."""


def append(sequence: Sequence, token_id: int, context_len: int, *, is_drawn: bool) -> FinishReason | None:
    """Appends one token to the output. Returns the finish reason if the output then ends, else None.

    Raises InvalidRequest, RequestFailed.
    """
    params = sequence.request.params
    stops_allowed = len(sequence.token_ids) - sequence.terms.num_prompt + 1 >= params.min_new_tokens
    is_end = stops_allowed and token_id in sequence.terms.end_token_ids
    constraint = None if is_end else sequence.constraint
    if is_drawn and sequence.constraint is not None:
        sequence.constraint.note_drawn()
    if constraint is not None:
        constraint.accept(token_id)
    stop = None
    if not is_end or params.no_stop_trim:
        stop = sequence.detokenizer.append(token_id, stops_allowed=stops_allowed)
    sequence.append(token_id, is_drawn=is_drawn)
    if stop is None and constraint is not None and constraint.is_done:
        return finish.complete(sequence)
    return finish.reached(sequence, stop=stop, end_token_id=token_id if is_end else None, context_len=context_len)


def forced(sequence: Sequence, *, context_len: int) -> FinishReason | None:
    """Appends the forced tokens. Returns the finish reason if the output then ends, else None.

    Raises InvalidRequest, RequestFailed.
    """
    if sequence.constraint is None or sequence.request.max_new_tokens == 0:
        return None
    if sequence.constraint.is_done:
        return finish.complete(sequence)
    for token_id in sequence.constraint.forced(sequence.num_left):
        _check_not_banned(sequence, token_id)
        sequence.constraint.num_forced += 1
        reason = append(sequence, token_id, context_len, is_drawn=False)
        if reason is not None:
            return reason
    return None


def explained(sequence: Sequence, error: RowError) -> RowError:
    """Returns a row's error. If a client's field forbade all tokens, the error names the field."""
    banned = sequence.request.banned
    return error if banned is None or error != NOTHING_TO_DRAW else RowError.of(_nothing_left(banned.field))


def _check_not_banned(sequence: Sequence, token_id: int) -> None:
    """Raises InvalidRequest for a token that the grammar forces and the request forbids."""
    banned = sequence.request.banned
    if banned is not None and banned.forbid(sequence.token_ids[sequence.terms.num_prompt :], token_id):
        raise _nothing_left(banned.field)


def _nothing_left(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} forbids every token that the rest of the request allows next; remove the words that the output needs",
        field=field,
        code="bad_words",
    )


def delta(sequence: Sequence, reason: FinishReason | None) -> OutputDelta | None:
    """Returns the unsent part of the output that may be sent; None if there is none and the output continues."""
    start = sequence.terms.num_prompt + sequence.sent.num_tokens
    logprobs = () if sequence.asked.scores is None else sequence.asked.scores.take_output()
    end = None if sequence.asked.scores is None else start + len(logprobs)  # sent in order, with their scores
    token_ids = tuple(sequence.token_ids[start:end])
    sequence.sent.num_tokens += len(token_ids)
    progress = _progress(sequence) if sequence.request.reports_progress else None
    if not token_ids and reason is None:
        return None if progress is None else OutputDelta(sequence.request.id, usage=progress)
    usage = progress or sequence.usage
    text_end = None if sequence.terms.is_plain else sequence.text_end
    detokenizer = sequence.detokenizer
    text = detokenizer.take(text_end) if reason is None else detokenizer.close(text_end)
    is_last, constraint = reason is not None, sequence.constraint
    unenforced = () if reason is None or constraint is None else _unenforced(sequence, constraint, reason)
    if sequence.terms.is_plain:
        return OutputDelta(sequence.request.id, token_ids, text, usage, finish=reason, unenforced=unenforced)
    return OutputDelta(
        id=sequence.request.id,
        token_ids=token_ids,
        text=text,
        usage=usage,
        output_logprobs=logprobs,
        prompt_logprobs=() if sequence.asked.scores is None else sequence.asked.scores.take_prompt(),
        finish=reason,
        hidden_states=() if sequence.asked.hidden is None else sequence.asked.hidden.take(is_last=is_last),
        unenforced=unenforced,
        explanations=_take_explanations(sequence, len(token_ids)),
        timeline=None if reason is None or sequence.asked.times is None else sequence.asked.times.end(),
    )


def _progress(sequence: Sequence) -> Usage | None:
    """Returns the usage with the computed part of the prompt; None once a token was drawn. Forced tokens may be sent
    earlier."""
    if sequence.num_output > sequence.num_forced:
        return None
    num_computed = min(sequence.num_computed, sequence.terms.num_prompt)
    return msgspec.structs.replace(sequence.usage, computed_tokens=num_computed)


def _take_explanations(sequence: Sequence, count: int) -> tuple[Explanation, ...]:
    """Returns the explanations of the next `count` output tokens, if requested, each once."""
    waiting = sequence.asked.explanations
    if waiting is None:
        return ()
    taken = tuple(waiting[:count])
    del waiting[:count]
    return taken


def _unenforced(sequence: Sequence, constraint: Constraint, reason: FinishReason) -> tuple[str, ...]:
    """Returns the unenforced parts of the constraint of an output that ends."""
    names, request = tuple(map(str, constraint.unenforced)), sequence.request
    was_cut = reason.type == "length" and request.params.close_early and request.max_new_tokens > 0
    return (*names, NOT_CLOSED) if was_cut and not constraint.closes else names
