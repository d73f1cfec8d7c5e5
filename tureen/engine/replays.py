"""Replays outputs that another engine began: appends the tokens that their clients have, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

from tureen.contract.types import GenerateRequest
from tureen.engine import finish, output
from tureen.engine.sequence import Sequence
from tureen.errors import RequestFailed, TureenError

TOKENS_AT_ONCE = 256
"""Maximum number of tokens replayed between two steps, which delays other requests no longer than a step does."""


class Replays:
    """Sequences that do not yet have the whole output that another engine sent.

    After its replay a sequence is in the state of a preempted one.
    """

    def __init__(self) -> None:
        self.waiting: dict[Sequence, Iterator[None]] = {}  # read from outside, changed here only

    def add(self, sequence: Sequence, context_len: int) -> None:
        """Begins to replay a sequence's output. Its grammar, if it has one, is compiled."""
        self.waiting[sequence] = _replay(sequence, context_len)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is being replayed and has ended."""
        del self.waiting[sequence]

    def lacks(self, sequence: Sequence) -> bool:
        """Returns whether the sequence lacks a part of the sent output. Until it has it, nothing may be sent."""
        return sequence in self.waiting or sequence.num_output < len(sequence.request.resumed)

    def advance(self) -> list[Sequence]:
        """Replays up to TOKENS_AT_ONCE tokens, in order of arrival. Returns the sequences that are complete.

        Also returns a sequence that `ended` with an error, which still waits here.
        """
        done: list[Sequence] = []
        num_left = TOKENS_AT_ONCE
        for sequence, tokens in tuple(self.waiting.items()):
            try:
                while num_left > 0 and next(tokens, self) is None:
                    num_left -= 1
            except TureenError as error:
                sequence.ended = finish.failed(error)
                done.append(sequence)
                continue
            if num_left <= 0:
                break
            del self.waiting[sequence]
            done.append(sequence)
        return done


def check(request: GenerateRequest, vocab_size: int) -> None:
    """Raises RequestFailed if `resumed` cannot be an output of this request."""
    num_resumed = len(request.resumed)
    is_fixed = request.grammar is None or bool(request.limit_field)  # else it may rise when the grammar is compiled
    if num_resumed > request.max_new_tokens and is_fixed:
        raise _not_resumable(f"it has {num_resumed} tokens, at most {request.max_new_tokens} are asked for")
    unknown = next((token_id for token_id in request.resumed if not 0 <= token_id < vocab_size), None)
    if unknown is not None:
        raise _not_resumable(f"it has token {unknown}, the model has tokens 0 to {vocab_size - 1}")
    if min(request.resumed_cached, request.resumed_states) < 0:
        raise _not_resumable("its resumed_cached or resumed_states is negative")


def _replay(sequence: Sequence, context_len: int) -> Iterator[None]:
    """Appends the sent output in its original order: drawn tokens, and the tokens that the grammar forced after each.

    Tokens that are forced after the last one are sent as new. Raises InvalidRequest, RequestFailed.
    """
    resumed = sequence.request.resumed
    sequence.ended = output.forced(sequence, context_len=context_len)
    while sequence.num_output < len(resumed):
        if sequence.ended is not None:
            raise _not_resumable(f"it ends after {sequence.num_output} of {len(resumed)} tokens")
        token_id = resumed[sequence.num_output]
        if sequence.constraint is not None:
            sequence.constraint.look_ahead(sequence.num_left)
        sequence.ended = output.append(sequence, token_id, context_len, is_drawn=True)
        if sequence.ended is None:
            sequence.ended = output.forced(sequence, context_len=context_len)
        yield
    num_prompt = sequence.terms.num_prompt
    if tuple(sequence.token_ids[num_prompt : num_prompt + len(resumed)]) != resumed:
        raise _not_resumable("the grammar does not allow it")
    sequence.detokenizer.take(sequence.sent.text_ends[len(resumed) - 1])  # was sent with them


def _not_resumable(why: str) -> RequestFailed:
    return RequestFailed(
        f"the output sent so far cannot be continued: {why}; this is a fault of the server", code="not_resumable"
    )
