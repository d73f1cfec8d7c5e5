"""Declares the fields about tokens that chats and completions share, in the forms of vLLM and SGLang, and writes what
they ask for.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from tureen.contract.params import INT64_MAX
from tureen.contract.types import LogprobSpec, PositionLogprobs, TokenLogprob
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai.answer import Answer, token_text
from tureen.dialects.openai.body import OpenAIBody, TopLogprobs, TopOrAll
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.fields.body import require_equal
from tureen.fields.shared import MAX_LOGPROB_IDS, MAX_TOKEN_IDS, CacheKey, Explain
from tureen.requests.drafts import ALL, Plan, check_all_fit
from tureen.requests.explanations import Explained
from tureen.requests.generation import Output
from tureen.requests.prompts import shown_ids
from tureen.requests.state import Context
from tureen.requests.timings import PromptProgress, timings

NO_PICTURES = "prompt_logprobs: pictures have no log-probabilities; leave it out"


ReturnProgress = Annotated[
    bool, Meta(description="Chunks of a stream say how much of a long prompt is computed, as llama.cpp's do.")
]


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
    n_probs: Annotated[
        TopLogprobs | None,
        Meta(description="llama.cpp's name of the number of log-probabilities of each token; 0 = none."),
    ] = None
    prompt_logprobs: Annotated[
        TopOrAll | None,
        Meta(
            description="Return log-probabilities of the prompt's tokens, and of this number of best alternatives; "
            "-1 = of the whole vocabulary."
        ),
    ] = None
    prompt_logprob_start: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOKEN_IDS)] | None,
        Meta(description="First position of prompt_logprobs; its entry is null. Default: the prompt's first token."),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_LOGPROB_IDS)] | None,
        Meta(description="Log-probabilities of these tokens too, at every position; also without logprobs."),
    ] = None
    return_hidden_states: Annotated[
        bool, Meta(description="Each choice has the last position's hidden state, as SGLang's has.")
    ] = False
    explain: Explain = False
    return_cached_tokens_details: Annotated[
        bool, Meta(description="Return where the cached tokens were, as cached_tokens_details in sglext.")
    ] = False
    timings_per_token: Annotated[
        bool, Meta(description="Return llama.cpp's timings, in streams with every chunk of a choice.")
    ] = False
    return_meta_info: Annotated[bool, Meta(description="Each choice has `meta_info`, as in answers of /generate.")] = (
        False
    )
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None,
        Meta(description="Keep only this many tokens of the prompt, the last ones; -1 = as many as fit the context."),
    ] = None
    extra_key: Annotated[
        CacheKey | Annotated[list[CacheKey], Meta(max_length=16)] | None,
        Meta(description="Separates the prefix cache, together with the salt."),
    ] = None


B = TypeVar("B", bound=TokenBody)


def check(body: TokenBody, *, has_logprobs: bool) -> None:
    """Raises InvalidRequest for fields that cannot go together. `has_logprobs`: log-probabilities are asked for."""
    if body.return_tokens_as_token_ids and not has_logprobs and body.prompt_logprobs is None:
        ignored.tell("return_tokens_as_token_ids", "it needs log-probabilities, which the request does not ask for")
    if body.prompt_logprob_start and body.prompt_logprobs is None:
        raise InvalidRequest("prompt_logprob_start needs prompt_logprobs", field="prompt_logprob_start")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot go with stream; leave one out", field="prompt_logprobs")
    if body.truncate_prompt_tokens == 0:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field} must be -1 or at least 1, got 0: a prompt has at least one token", field=field)


def with_probs(body: B, field: str, **further: Any) -> B:
    """Returns a body that has its `n_probs` in the route's own field, and `further` values. Raises InvalidRequest."""
    if not body.n_probs:
        return body
    if (sent := getattr(body, field)) is not None:
        require_equal("n_probs", body.n_probs, field, sent)
    return msgspec.structs.replace(body, **{field: body.n_probs}, **further)


def logprob_spec(body: TokenBody, top: int | None, context: Context, *, prompt_too: bool = False) -> LogprobSpec | None:
    """Returns the log-probabilities to compute, as `body.logprobs_of` does, for the prompt's and for the asked ids
    too. Raises InvalidRequest."""
    limit = context.info.vocab_size
    if top is None and body.logprob_token_ids:
        top = 0
    elif top == ALL:
        top = limit
    for token_id in body.logprob_token_ids or ():
        if not 0 <= token_id < limit:
            field = "logprob_token_ids"
            raise InvalidRequest(f"{field} must be token ids in [0, {limit}), got {token_id}", field=field)
    if body.prompt_logprobs is not None:
        top = max(limit if body.prompt_logprobs == ALL else body.prompt_logprobs, top or 0)
        return LogprobSpec(body.prompt_logprob_start or 0, top, tuple(body.logprob_token_ids or ()), body.logprobs_mode)
    spec = openai_fields.logprobs_of(body, top, prompt_too=prompt_too)
    if spec is None or not body.logprob_token_ids:
        return spec
    return LogprobSpec(spec.prompt_start, spec.top, tuple(body.logprob_token_ids), spec.mode)


def check_plan(body: TokenBody, plan: Plan, top_field: str, top: int | None) -> None:
    """Raises InvalidRequest for log-probabilities that start after a prompt, or are too many for an answer.

    `top`: the alternatives that the body asks for in `top_field`.
    """
    start, shortest = body.prompt_logprob_start or 0, min(len(request.token_ids) for request in plan.requests)
    if start and start >= shortest:
        field = "prompt_logprob_start"
        raise InvalidRequest(f"{field} must be a position in a prompt of {shortest} tokens, got {start}", field=field)
    if ALL not in (top, body.prompt_logprobs):
        return
    check_all_fit(plan.requests, top_field if top == ALL else "prompt_logprobs")


def most_prompt_tokens(body: TokenBody, max_new_tokens: int | None, context: Context) -> int | None:
    """Returns how many of a prompt's last tokens are kept; None = all. `max_new_tokens`: what is left
    for the output; None = one token at least."""
    most = body.truncate_prompt_tokens
    return max(1, context.capacity - (max_new_tokens or 1)) if most == -1 else most


def prompt_logprobs(output: Output, body: TokenBody, context: Context) -> list[dict[str, Answer] | None]:
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt, its own log-probability and those of the best
    alternatives, by token id. The first has none. `rank` is null where it is worse than the alternatives asked for."""
    count = _count(body.prompt_logprobs)
    return [_of_position(position, count, context) for position in output.prompt_logprobs]


def _count(top: int | None) -> int | None:
    """Returns how many alternatives are shown; None = all."""
    return None if top == ALL else top or 0


def _of_position(position: PositionLogprobs, count: int | None, context: Context) -> dict[str, Answer] | None:
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


def extension(output: Output, body: TokenBody) -> Answer:
    """Returns SGLang's own fields of an answer, which are known at its end: `sglext`, if the body asks for any."""
    if not body.return_cached_tokens_details:
        return {}
    usage = output.usage
    loaded = {"storage": usage.loaded_tokens} if usage.loaded_tokens else {}
    details = {"device": usage.cached_tokens - usage.loaded_tokens, "host": 0, **loaded}
    return {"sglext": {"cached_tokens_details": details}}


def timings_of(output: Output, body: TokenBody) -> Answer:
    """Returns llama.cpp's `timings` of the output so far, for an answer or a chunk."""
    return {"timings": timings(output)} if body.timings_per_token else {}


class TokenNames:
    """Names tokens in log-probabilities: by their texts, or by their ids where the body wants that."""

    def __init__(self, body: TokenBody, context: Context) -> None:
        self._has_ids = body.return_tokens_as_token_ids
        self._tokenizer = context.tokenizer

    def name(self, token_id: int) -> str:
        """Returns the token's name."""
        return f"token_id:{token_id}" if self._has_ids else token_text(self._tokenizer, token_id)


def alternatives(position: PositionLogprobs, top: int | None) -> list[TokenLogprob]:
    """Returns the best `top` tokens of a position, -1 = all, then the asked ones that are not among them."""
    best = list((position.top or ())[: _count(top)])
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
        self.progress = PromptProgress(output)

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
            "weight_version": output.versions[-1][0],
            **timing(output),
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


def timing(output: Output) -> dict[str, float]:
    """Return the times of a finished output under SGLang's names, in seconds and tokens a second. Without a rate if no
    tokens came after the first."""
    times = {"e2e_latency": output.elapsed_s}
    if output.remarks.first is not None:
        first_s, num_first = output.remarks.first
        times["first_token_latency"] = first_s
        if len(output.token_ids) > num_first and output.elapsed_s > first_s:
            times["decode_throughput"] = (len(output.token_ids) - num_first) / (output.elapsed_s - first_s)
    return times
