"""Declares the fields about tokens that chats and completions share, in the forms of vLLM and SGLang, and writes what
they ask for.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tureen.contract.params import INT64_MAX
from tureen.contract.types import NO_TOKEN, LogprobSpec, PositionLogprobs, TokenLogprob
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai.answer import Answer, token_text
from tureen.dialects.openai.body import OpenAIBody, TopLogprobs
from tureen.errors import InvalidRequest
from tureen.requests.explanations import Explained
from tureen.requests.generation import Output
from tureen.requests.shared_fields import MAX_LOGPROB_IDS, MAX_SALT_CHARS, Explain
from tureen.requests.state import Context

NO_PICTURES = "prompt_logprobs: a picture has no tokens to take log-probabilities of; leave it out"

Key = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]


class TokenBody(OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields about tokens that chats and completions have."""

    return_token_ids: Annotated[
        bool, Meta(description="Return the ids of the prompt's and the output's tokens, as vLLM does.")
    ] = False
    return_prompt_token_ids: Annotated[
        bool, Meta(description="Each choice has the ids of the prompt's tokens, as SGLang's has.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="Log-probabilities name a token by its id, as `token_id:42`.")
    ] = False
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        Meta(description="Return log-probabilities of the prompt's tokens, and of this many best alternatives."),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_LOGPROB_IDS)] | None,
        Meta(description="Log-probabilities of these tokens too, at every position; needs logprobs."),
    ] = None
    return_hidden_states: Annotated[
        bool, Meta(description="Each choice has the last position's hidden state, as SGLang's has.")
    ] = False
    explain: Explain = False
    return_meta_info: Annotated[
        bool, Meta(description="Each choice has `meta_info`, what /generate tells of an output.")
    ] = False
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None,
        Meta(description="Keep only this many tokens of the prompt, the last ones; -1 = as many as fit the context."),
    ] = None
    extra_key: Annotated[
        Key | Annotated[list[Key], Meta(max_length=16)] | None,
        Meta(description="Separates the prefix cache, together with the salt."),
    ] = None


def check(body: TokenBody, *, has_logprobs: bool) -> None:
    """Raises InvalidRequest for fields that cannot go together. `has_logprobs`: log-probabilities are asked for."""
    for name in ("logprob_token_ids", "return_tokens_as_token_ids"):
        if getattr(body, name) and not has_logprobs and not (body.prompt_logprobs is not None and name[0] == "r"):
            raise InvalidRequest(f"{name} needs logprobs", field=name)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot go with stream; leave one out", field="prompt_logprobs")
    if body.truncate_prompt_tokens == 0:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field} must be -1 or at least 1, got 0: a prompt has at least one token", field=field)


def logprob_spec(body: TokenBody, top: int | None, context: Context, *, prompt_too: bool = False) -> LogprobSpec | None:
    """Returns the log-probabilities to compute, as `body.logprobs_of` does, for the prompt's and for the asked ids
    too. Raises InvalidRequest."""
    limit = context.info.vocab_size
    for token_id in body.logprob_token_ids or ():
        if not 0 <= token_id < limit:
            field = "logprob_token_ids"
            raise InvalidRequest(f"{field} must be token ids in [0, {limit}), got {token_id}", field=field)
    if body.prompt_logprobs is not None:
        top = max(body.prompt_logprobs, top or 0)
        return LogprobSpec(0, top, tuple(body.logprob_token_ids or ()), body.logprobs_mode)
    spec = openai_fields.logprobs_of(body, top, prompt_too=prompt_too)
    if spec is None or not body.logprob_token_ids:
        return spec
    return LogprobSpec(spec.prompt_start, spec.top, tuple(body.logprob_token_ids), spec.mode)


def salt_of(salt: str, extra_key: str | list[str] | None) -> str:
    """Returns what separates a request's prefix cache: both together."""
    if extra_key is None:
        return salt
    return "\0".join((salt, *([extra_key] if isinstance(extra_key, str) else extra_key)))


def most_prompt_tokens(body: TokenBody, max_new_tokens: int | None, context: Context) -> int | None:
    """Returns how many of a prompt's last tokens are kept; None = all. `max_new_tokens`: what is left
    for the output; None = one token at least."""
    most = body.truncate_prompt_tokens
    return max(1, context.capacity - (max_new_tokens or 1)) if most == -1 else most


def shown_ids(ids: Sequence[int], context: Context) -> list[int]:
    """Returns the ids of a prompt's tokens as answers show them: those of a picture are its placeholder's, or the one
    that the model has for its embeddings."""
    if not ids or min(ids) > NO_TOKEN:
        return list(ids)
    placeholder = next(iter(sorted(context.placeholder_ids)), NO_TOKEN)
    if context.family is not None and context.family.inner_id is not None:
        placeholder = context.family.inner_id
    return [placeholder if token_id <= NO_TOKEN else token_id for token_id in ids]


def prompt_logprobs(output: Output, body: TokenBody, context: Context) -> list[dict[str, Answer] | None]:
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt, its own log-probability and those of the best
    alternatives, by token id. The first has none. `rank` is null where it is worse than the alternatives asked for."""
    return [_of_position(position, body.prompt_logprobs or 0, context) for position in output.prompt_logprobs]


def _of_position(position: PositionLogprobs, count: int, context: Context) -> dict[str, Answer] | None:
    if position.token[0] is None:
        return None
    ranks = {token_id: rank for rank, (_, token_id) in enumerate(position.top or (), 1)}
    shown = {token_id: value for value, token_id in (position.top or ())[:count]}
    shown[position.token[1]] = position.token[0]
    return {
        str(token_id): {
            "logprob": value,
            "rank": ranks.get(token_id),
            "decoded_token": context.tokenizer.token_text(token_id),
        }
        for token_id, value in shown.items()
    }


def of_answer(output: Output, body: TokenBody, context: Context) -> Answer:
    """Returns the fields about the prompt that a chat's answer has beside its choices."""
    fields = Answer()
    if body.return_token_ids:
        fields["prompt_token_ids"] = shown_ids(output.request.token_ids, context)
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(output, body, context)
    return fields


class TokenNames:
    """Names tokens in log-probabilities: by their texts, or by their ids where the body wants that."""

    def __init__(self, body: TokenBody, context: Context) -> None:
        self._has_ids = body.return_tokens_as_token_ids
        self._tokenizer = context.tokenizer

    def name(self, token_id: int) -> str:
        """Returns the token's name."""
        return f"token_id:{token_id}" if self._has_ids else token_text(self._tokenizer, token_id)


def alternatives(position: PositionLogprobs, count: int) -> list[TokenLogprob]:
    """Returns the best `count` tokens of a position, then the asked ones that are not among them."""
    best = list((position.top or ())[:count])
    ids = {token_id for _, token_id in best}
    return best + [entry for entry in position.token_ids or () if entry[1] not in ids]


class ChoiceTokens:
    """Writes the fields about tokens of one choice, whole or chunk by chunk."""

    def __init__(self, output: Output, body: TokenBody, context: Context) -> None:
        self._output = output
        self._body = body
        self._context = context
        self._num_sent = 0
        self._explained = Explained(context)

    def first(self) -> Answer:
        """Returns the fields about the prompt, for the first chunk."""
        if not self._body.return_prompt_token_ids:
            return {}
        return {"prompt_token_ids": shown_ids(self._output.request.token_ids, self._context)}

    def so_far(self) -> Answer:
        """Returns the fields about the output's tokens since the last call."""
        fields = Answer()
        if self._body.return_token_ids:
            fields["token_ids"] = self._output.token_ids[self._num_sent :]
            self._num_sent = len(self._output.token_ids)
        fields |= self._explained.new(self._output)
        return fields

    def at_end(self) -> Answer:
        """Returns the fields about a finished output."""
        fields = Answer()
        if self._body.return_hidden_states:
            states = self._output.hidden_states
            fields["hidden_states"] = np.frombuffer(states[-1], dtype=np.float32).tolist() if states else []
        if self._body.return_meta_info:
            fields["meta_info"] = self._meta_info()
        return fields

    def _meta_info(self) -> Mapping[str, Any]:
        output, spec = self._output, self._output.request.logprobs
        finish = output.finish
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None
            if finish is None
            else {"type": finish.type, "matched": finish.pattern or finish.matched},
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.usage.cached_tokens,
            "sampling_seed": output.request.seed,
            "weight_version": output.weight_versions[-1],
            "e2e_latency": output.elapsed_s,
        }
        if output.remarks.hardware:
            meta["hardware"] = output.remarks.hardware
        if spec is not None:
            meta["output_token_logprobs"] = [self._triple(position.token) for position in output.output_logprobs]
            meta["output_top_logprobs"] = [
                [self._triple(entry) for entry in position.top or ()] for position in output.output_logprobs
            ]
        return meta

    def _triple(self, logprob: TokenLogprob) -> list[Any]:
        return [*logprob, self._context.tokenizer.token_text(logprob[1])]
