"""A request and its output so far: what is left of it for another engine."""

from __future__ import annotations

import msgspec

from tureen import errors
from tureen.contract.types import FinishReason, GenerateRequest, OutputDelta, Usage
from tureen.logit_processor import BUILT_IN


class Live:
    """A request and its output so far, from however many engines."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.is_submitted = False  # to the engine that runs now
        self.usage: Usage | None = None
        self.token_ids = list(request.resumed)  # of the output
        self._num_chars = 0
        self._num_states = request.resumed_states
        self._cached_tokens: int | None = None  # that the first engine found; no other's cache is the client's affair
        if request.resumed:
            self._cached_tokens = request.resumed_cached
        self._repeat: RepeatedOutput | None = None

    def take(self, delta: OutputDelta) -> OutputDelta | None:
        """Returns the part of an engine's delta that the client does not have; None where it has all of it.

        Raises RequestFailed where a new engine does not repeat what an earlier one said.
        """
        if self._repeat is not None:
            rest = self._repeat.rest_of(delta)
            if rest is None:
                return None
            delta = rest
        if delta.usage is not None:
            if self._cached_tokens is None:
                self._cached_tokens = delta.usage.cached_tokens
            elif delta.usage.cached_tokens != self._cached_tokens:
                usage = msgspec.structs.replace(delta.usage, cached_tokens=self._cached_tokens)
                delta = msgspec.structs.replace(delta, usage=usage)
            self.usage = delta.usage
        self.token_ids += delta.token_ids
        self._num_chars += len(delta.text)
        self._num_states += len(delta.hidden_states)
        return delta

    def rest(self, now_s: float) -> GenerateRequest | FinishReason:
        """Returns the request that is left for another engine; or the finish reason, where nothing is left to do.

        now_s: seconds of the monotonic clock, from which the deadlines that are left are computed.
        """
        request, self._repeat = self.request, None
        if request.deadline_ms is not None and now_s > self.arrived_s + request.deadline_ms / 1000:
            return FinishReason(type="abort", message="Aborted", reason="deadline")
        if not self.token_ids:
            return request
        if must_repeat(request):
            self._repeat = RepeatedOutput(tuple(self.token_ids), self._num_chars, self._num_states)
            return msgspec.structs.replace(request, ttft_deadline_ms=None)
        return msgspec.structs.replace(
            request,
            resumed=tuple(self.token_ids),
            resumed_cached=self._cached_tokens or 0,
            resumed_states=self._num_states,
        )


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
                "the engine was replaced, and the output came out otherwise the second time: the logit processor does "
                "not do the same for the same tokens, or the weights were exchanged; send the request again",
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
        )


def must_repeat(request: GenerateRequest) -> bool:
    """Says whether an engine can continue only by making the output again from its start.

    A client's processor may have kept a state that the tokens do not tell.
    """
    return request.processor not in ("", *BUILT_IN)
