"""An output that an engine makes again, where what was made cannot simply be continued."""

from __future__ import annotations

import msgspec

from tureen import errors
from tureen.contract.types import GenerateRequest, OutputDelta
from tureen.logit_processor import BUILT_IN


class RepeatedOutput:
    """An output that an engine makes again from its start. What the client has of it is compared and left out."""

    def __init__(self, token_ids: tuple[int, ...], num_chars: int, num_states: int) -> None:
        self._token_ids = token_ids
        self._num_chars = num_chars
        self._num_states = num_states
        self._num_seen = 0  # of these tokens

    def rest_of(self, delta: OutputDelta) -> OutputDelta | None:
        """Returns what a delta adds to what the client has; None where it adds nothing.

        Raises RequestFailed where the output differs from what the client has.
        """
        expected = self._token_ids[self._num_seen : self._num_seen + len(delta.token_ids)]
        num_old = len(expected)
        self._num_seen += num_old
        has_less = self._num_seen < len(self._token_ids) and delta.finish is not None and delta.finish.type != "error"
        if has_less or delta.token_ids[:num_old] != expected:
            raise errors.RequestFailed(
                "the engine was replaced, and the recomputed output differs: the logit processor is not "
                "deterministic, or the weights were replaced; send the request again",
                code="cannot_resume",
            )
        num_chars, num_states = min(self._num_chars, len(delta.text)), min(self._num_states, len(delta.hidden_states))
        self._num_chars -= num_chars
        self._num_states -= num_states
        if delta.finish is None and num_old == len(delta.token_ids):
            return None
        return msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[num_old:],
            text=delta.text[num_chars:],
            output_logprobs=delta.output_logprobs[num_old:],
            prompt_logprobs=(),
            hidden_states=delta.hidden_states[num_states:],
            explanations=delta.explanations[num_old:],
        )


def must_repeat(request: GenerateRequest) -> bool:
    """Says whether an engine can continue only by making the output again from its start.

    A client's processor may have kept a state that the tokens do not tell.
    """
    return request.processor not in ("", *BUILT_IN)
