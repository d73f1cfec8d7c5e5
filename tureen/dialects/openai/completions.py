"""Serves OpenAI's `/v1/completions`.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.config import MAX_N, MAX_PROMPTS
from tureen.contract.types import LogprobSpec, PositionLogprobs
from tureen.dialects.openai import answer as openai_answer
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai import token_fields
from tureen.dialects.openai.answer import Answer, StreamUsage
from tureen.dialects.openai.body import TokenLimit, TopOrAll
from tureen.dialects.openai.token_fields import ChoiceTokens, ReturnProgress, TokenBody, TokenNames
from tureen.errors import InvalidRequest
from tureen.fields.body import read_json
from tureen.fields.shared import MAX_TOKEN_IDS, TokenIds
from tureen.http.dialect import Docs, Entry, client_name, prepared, unless_gone
from tureen.requests import planning, prompts, tokenising
from tureen.requests.drafts import Draft, Options, Plan, plan_of, salt_of
from tureen.requests.fill_in_middle import fill_in_prompts, fill_in_tokens
from tureen.requests.generation import Output, Run
from tureen.requests.offload import INLINE_CHARS, offload
from tureen.requests.prompts import Prompt, Texts
from tureen.requests.state import Context, ServerState
from tureen.text.detokenizer import Detokenizer

DEFAULT_MAX_TOKENS = 16

TABLE = openai_fields.table_of("completions")


class CompletionBody(TokenBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/completions`."""

    prompt: Annotated[
        str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PROMPTS})],
        Meta(description="The prompt: a text, token ids, or a list of texts or of lists of ids."),
    ]
    max_tokens: Annotated[
        TokenLimit,
        Meta(
            description="Most tokens to generate; -1 = up to the context end, 0 = compute the prompt only, to echo its "
            "logprobs.",
        ),
    ] = DEFAULT_MAX_TOKENS
    max_output_tokens: Annotated[TokenLimit | None, Meta(description="Another name of max_tokens.")] = None
    max_new_tokens: Annotated[
        TokenLimit | None, Meta(description="Another name of max_tokens; null = up to the context end.")
    ] = DEFAULT_MAX_TOKENS
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_N)] | None,
        Meta(description="Outputs to generate; the n with the highest log-probability per token are returned."),
    ] = None
    suffix: Annotated[
        str | None,
        Meta(description="Text after the gap that is filled in, for models with tokens for that (Qwen Coder …)."),
    ] = None
    echo: Annotated[bool, Meta(description="The text begins with the prompt; with logprobs, its tokens' too.")] = False
    return_progress: ReturnProgress = False
    logprobs: Annotated[
        TopOrAll | None,
        Meta(
            description="Return log-probabilities: of each token, and of this number of best alternatives; -1 = of the "
            "whole vocabulary."
        ),
    ] = None

    @property
    def is_text(self) -> bool:
        """Whether prompts are texts, not token ids."""
        return isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], str))

    @property
    def num_generated(self) -> int:
        """Samples of each prompt."""
        return self.best_of or self.n


def routes(state: ServerState) -> list[Entry]:
    """Returns the route of this API."""

    async def completions(request: Request) -> ASGIApp:
        payload = read_json(request.headers.get("content-type"), await request.body())
        return await _respond(payload, request, state)

    docs = Docs(
        "OpenAI",
        "Continue a text.",
        bodies=(CompletionBody,),
        example={"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        stream="text/event-stream",
    )
    return [Entry("/v1/completions", completions, access="user", methods=["POST"], docs=docs)]


async def _respond(payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    state.check_accepting()
    body, context = parse(payload), state.context
    name = openai_answer.name_of(body, "cmpl-")
    plan, prefixes = await prepared(request, _plan(body, payload, name, client_name(request), state))
    token_fields.check_plan(body, plan, "logprobs", body.logprobs)
    run = Run(state, plan)
    texts = [GrowingText(output, prefixes[output.index // body.num_generated], body, context) for output in run.outputs]
    head = openai_answer.head(name, "text_completion", body, context)
    if body.stream:
        return await openai_answer.open_stream(request, _chunks(run, texts, body, head, context))
    outputs = await unless_gone(request, run.whole())
    size = sum(output.num_logprobs for output in outputs)
    chosen = await offload.run_each(size, GrowingText.catch_up, _chosen(texts, body))
    answer = head | {
        "choices": [choice | {"index": index} for index, choice in enumerate(chosen)],
        "usage": openai_answer.usage(run.outputs, body.num_generated),
        **token_fields.extension(run.outputs[0], body),
        **token_fields.timings_of(run.outputs[0], body),
        **openai_answer.metadata(body, context),
    }
    return Response(openai_answer.encode(answer), media_type="application/json")


def parse(payload: dict[str, Any]) -> CompletionBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    if payload.get("logprobs") is False:  # as a chat says that it wants none
        payload = payload | {"logprobs": None}
    body = token_fields.with_probs(openai_fields.read(payload, CompletionBody, TABLE), "logprobs")
    token_fields.check(body, has_logprobs=body.logprobs is not None)
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest(f"best_of must be at least n ({body.n}), got {body.best_of}", field="best_of")
    if body.stream and body.num_generated > body.n:
        raise InvalidRequest("best_of cannot go with stream: the best are known only at the end", field="best_of")
    if body.echo and body.logprobs is not None and body.prompt_logprob_start:
        field = "prompt_logprob_start"
        raise InvalidRequest(f"{field} cannot go with echo, which shows all of the prompt; leave one out", field=field)
    if body.suffix:
        _check_suffix(body)
    return body


def _check_suffix(body: CompletionBody) -> None:
    """Raises InvalidRequest for what cannot go with a suffix."""
    if not body.is_text and body.prompt != []:
        raise InvalidRequest("suffix needs a prompt of text; put the tokens for the gap into the ids", field="suffix")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise InvalidRequest(f"suffix cannot go with {name}; leave one out", field="suffix")


async def _plan(
    body: CompletionBody, payload: dict[str, Any], name: str, owner: str, state: ServerState
) -> tuple[Plan, list[str]]:
    """Makes the requests, and the text that each prompt's choices begin with. Raises InvalidRequest, NotFound."""
    context, count = state.context, body.num_generated
    planning.check_priority(body.priority, context)
    fields, names = openai_fields.requested_sampling(payload, body, "max_tokens")
    if body.best_of is not None:
        names = names._replace(renamed={**names.renamed, "n": "best_of"})
    if body.suffix:
        fields["stop_token_ids"] = (*fields.get("stop_token_ids", ()), *fill_in_tokens(context).end_ids)
    defaults = {"max_new_tokens": DEFAULT_MAX_TOKENS}
    sampling = await planning.sampling_of(fields | {"n": count}, context, names, defaults)
    most = token_fields.most_prompt_tokens(body, fields.get("max_new_tokens", DEFAULT_MAX_TOKENS), context)
    inputs, prompt_names = await _inputs(body, context, may_be_cut=most is not None)
    batch = len(prompt_names)
    planning.check_size(batch, [sampling], "prompt", context.config)
    adapter, processor = openai_fields.adapter(body, state), openai_fields.processor(body, state)
    whole = await tokenising.resolve(inputs, prompt_names, state)
    resolved = [prompts.last_tokens(prompt, most, "truncate_prompt_tokens") for prompt in whole]
    options = Options(
        adapter=adapter,
        logprobs=_logprobs(body, context),
        hidden_states="last" if body.return_hidden_states else "none",
        processor=processor,
        return_effective=body.return_effective,
        explain=body.explain,
        reports_progress=body.stream and body.return_progress,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        ttft_deadline_ms=body.ttft_deadline_ms,
    )
    draft = Draft(
        prompts=resolved,
        names=prompt_names,
        samplings=[sampling] * batch,
        options=[options] * batch,
        owner=owner,
        rid=name,
        is_batch=batch > 1,
        log_metrics=body.log_metrics,
    )
    echoed = inputs if resolved == whole else resolved
    return plan_of(draft, state), _prefixes(body, echoed, resolved, context)


async def _inputs(
    body: CompletionBody, context: Context, *, may_be_cut: bool
) -> tuple[Texts | list[Prompt], list[str]]:
    """Returns the prompts, and what errors call each. Raises InvalidRequest."""
    if not body.suffix:
        return prompts.texts_or_ids(body.prompt, "prompt", context, may_be_cut=may_be_cut)
    is_batch = isinstance(body.prompt, list)
    texts = [text for text in (body.prompt if is_batch else [body.prompt]) if isinstance(text, str)]
    if len(texts) < (len(body.prompt) if is_batch else 1):
        raise InvalidRequest("prompt mixes texts and token ids; send one or the other", field="prompt")
    names = [f"prompt[{index}]" for index in range(len(texts))] if is_batch else ["prompt"]
    planning.check_batch(len(texts), "prompt", context)
    return await fill_in_prompts(texts, names, body.suffix, context), names


def _prefixes(
    body: CompletionBody, inputs: Texts | list[Prompt], resolved: list[Prompt], context: Context
) -> list[str]:
    if not body.echo:
        return [""] * len(resolved)
    if isinstance(inputs, Texts):
        return inputs.texts
    return [
        context.tokenizer.decode(prompt.token_ids, skip_special_tokens=body.skip_special_tokens) for prompt in resolved
    ]


def _logprobs(body: CompletionBody, context: Context) -> LogprobSpec | None:
    """Returns the log-probabilities to compute; best_of needs them even when the body does not ask for them."""
    spec = token_fields.logprob_spec(body, body.logprobs, context, prompt_too=body.echo)
    return LogprobSpec() if spec is None and body.num_generated > body.n else spec


class GrowingText:
    """Builds one choice of an answer, whole or piece by piece: text, and log-probabilities of the tokens that it is
    made of."""

    def __init__(self, output: Output, prefix: str, body: CompletionBody, context: Context) -> None:
        self.output = output
        self._prefix = prefix
        self._body = body
        self._context = context
        self._tokens = ChoiceTokens(output, body, context)
        self.progress = self._tokens.progress
        self._names = TokenNames(body, context)
        self._tokenizer = context.tokenizer
        self._params = msgspec.structs.replace(output.request.params, stop=(), stop_regex=())
        self._detokenizer = Detokenizer(context.tokenizer, self._params)
        self._has_begun = False
        self._num_chars = 0
        self._num_tokens = 0

    @property
    def has_news(self) -> bool:
        """Whether there is text, a finish reason or a first chunk that was not sent."""
        output = self.output
        is_first = bool(output.token_ids) and not self._has_begun
        return len(output.text) > self._num_chars or output.finish is not None or is_first

    def nothing(self) -> Answer:
        """Returns a choice without text, for a chunk before the first token."""
        return {"index": self.output.index, "text": "", "logprobs": None, "finish_reason": None}

    def catch_up(self) -> Answer:
        """Returns a choice with what is new since the last call."""
        output = self.output
        text = output.text[self._num_chars :] if self._has_begun else self._prefix + output.text
        has_logprobs = self._body.logprobs is not None or bool(self._body.logprob_token_ids)
        logprobs = self._logprobs() if has_logprobs else None
        choice: Answer = {
            "index": output.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if output.finish is None else output.finish.openai_name,
        }
        if not self._has_begun:
            choice |= self._tokens.first() | token_fields.of_answer(output, self._body, self._context)
        self._has_begun, self._num_chars = True, len(output.text)
        choice |= self._tokens.so_far()
        return choice if output.finish is None else choice | openai_answer.ending(output) | self._tokens.at_end()

    async def offloaded(self) -> Answer:
        """Does what `catch_up` does, in a thread when a long prompt has log-probabilities; reads a snapshot, because
        the output grows meanwhile."""
        output = self.output
        size = 0 if self._has_begun else output.num_logprobs
        if size <= INLINE_CHARS:
            return self.catch_up()
        self.output = output.snapshot()
        try:
            return await offload.run(size, self.catch_up)
        finally:
            self.output = output

    def _logprobs(self) -> Answer:
        output = self.output
        logprobs: Answer = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if not self._has_begun and output.prompt_logprobs and self._body.echo:
            for position, offset in zip(output.prompt_logprobs, self._prompt_offsets(), strict=True):
                self._append(logprobs, position, offset)
        for index in range(self._num_tokens, len(output.token_ids)):
            offset = self._detokenizer.length
            if offset >= len(output.text) and output.finish is None:
                break  # its text is held back, and a stop may still cut it off
            self._append(logprobs, output.output_logprobs[index], len(self._prefix) + min(offset, len(output.text)))
            self._detokenizer.append(output.token_ids[index], stops_allowed=False)
            self._num_tokens += 1
        return logprobs

    def _prompt_offsets(self) -> list[int]:
        """Returns where each prompt token begins in the choice's text, which lacks the tokenizer's special tokens."""
        params = (
            msgspec.structs.replace(self._params, skip_special_tokens=False) if self._body.is_text else self._params
        )
        detokenizer, offsets, whole = Detokenizer(self._tokenizer, params), [], ""
        for token_id in self.output.request.token_ids:
            offsets.append(detokenizer.length)
            detokenizer.append(token_id, stops_allowed=False)
            whole += detokenizer.take()
        start = max((whole + detokenizer.close()).find(self._prefix), 0)
        return [min(max(offset - start, 0), len(self._prefix)) for offset in offsets]

    def _append(self, logprobs: Answer, position: PositionLogprobs, offset: int) -> None:
        value, token_id = position.token
        text = self._names.name(token_id)
        logprobs["text_offset"].append(offset)
        logprobs["token_logprobs"].append(value)
        logprobs["tokens"].append(text)
        best: dict[str, float | None] = {text: value}
        # reversed: of two tokens with the same text the more probable one stays
        for logprob, alternative in reversed(token_fields.alternatives(position, self._body.logprobs)):
            best[self._names.name(alternative)] = logprob
        logprobs["top_logprobs"].append(None if value is None else best)


def _chosen(texts: Sequence[GrowingText], body: CompletionBody) -> list[GrowingText]:
    """Returns all choices, or with best_of each prompt's n with the highest mean log-probability, best first."""
    count = body.num_generated
    if count == body.n:
        return list(texts)
    best = []
    for start in range(0, len(texts), count):
        best += sorted(texts[start : start + count], key=_mean_logprob, reverse=True)[: body.n]
    return best


def _mean_logprob(text: GrowingText) -> float:
    return text.output.cumulative_logprob / max(1, len(text.output.output_logprobs))


async def _chunks(
    run: Run, texts: Sequence[GrowingText], body: CompletionBody, head: Answer, context: Context
) -> AsyncGenerator[Answer, None]:
    usage = StreamUsage(body, run.outputs, body.num_generated)
    async with contextlib.aclosing(run.events()) as events:
        async for event in events:
            text = texts[event.output.index]
            progress = text.progress.new()
            if text.has_news or progress:
                so_far = usage.so_far()
                choice = await text.offloaded() if text.has_news else text.nothing()
                notes = openai_answer.metadata(body, context) if choice["finish_reason"] is not None else {}
                notes |= token_fields.timings_of(event.output, body) | progress
                yield head | {"choices": [choice]} | so_far | notes
    if more := token_fields.extension(run.outputs[0], body):
        yield head | {"choices": []} | more
    if usage.at_end:
        yield head | usage.whole()
