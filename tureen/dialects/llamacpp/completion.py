"""Serves `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.types import LogprobSpec
from tureen.dialects.llamacpp.answer import LLAMA_ERROR, CompletionAnswer, error_object, error_response
from tureen.dialects.llamacpp.body import (
    DEFAULTS,
    LlamaCompletionBody,
    LlamaInfillBody,
    LlamaOptions,
    names_of,
    parse,
    prompts_of,
    sampling_fields,
)
from tureen.dialects.llamacpp.infill import end_ids, infill_prompt
from tureen.http.chat_answer import check_complete
from tureen.http.dialect import Docs, Entry, client_name, prepared, read_body_with, streamed, unless_gone
from tureen.http.sse import event
from tureen.requests import planning
from tureen.requests.drafts import Draft, Options, Plan, plan_of
from tureen.requests.generation import Run
from tureen.requests.model_field import adapter_of
from tureen.requests.offload import offload
from tureen.requests.state import ServerState

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""

    async def complete(request: Request) -> ASGIApp:
        payload, body = await read_body_with(request, lambda sent: (sent, parse(sent, LlamaCompletionBody)))
        return await _respond(body, payload, request, state)

    async def infill(request: Request) -> ASGIApp:
        payload, body = await read_body_with(request, lambda sent: (sent, parse(sent, LlamaInfillBody)))
        return await _respond(body, payload, request, state)

    about = Docs(
        "llama.cpp",
        "Continue a text.",
        bodies=(LlamaCompletionBody,),
        example={"prompt": "The capital of France is", "n_predict": 8},
        stream="text/event-stream",
        error=LLAMA_ERROR,
    )
    filling = about._replace(
        summary="Write the text between two others.",
        bodies=(LlamaInfillBody,),
        example={"input_prefix": "def f(x):\n", "input_suffix": "\n    return y", "n_predict": 8},
    )
    return [
        Entry(path, endpoint, access="user", methods=["POST"], docs=docs, render_error=error_response)
        for path, endpoint, docs in (("/completion", complete, about), ("/infill", infill, filling))
    ]


async def _respond(body: LlamaOptions, payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    state.check_accepting()
    plan = await prepared(request, _plan(body, payload, client_name(request), state))
    run = Run(state, plan)
    answers = [CompletionAnswer(output, body, state.context) for output in run.outputs]
    if body.stream:
        last_words = _stream(run, answers)
        return await streamed(request, last_words, lambda error: event(_json.encode(error_object(error))))
    outputs = await unless_gone(request, run.whole())
    for output in outputs:
        check_complete(output)
    size = sum(output.num_logprobs for output in outputs)
    wholes = await offload.run_each(size, lambda answer: answer.whole(), answers)
    return Response(_json.encode(wholes if len(wholes) > 1 else wholes[0]), media_type="application/json")


async def _plan(body: LlamaOptions, payload: dict[str, Any], owner: str, state: ServerState) -> Plan:
    """Make the requests. Raises InvalidRequest, NotFound."""
    context = state.context
    fields = sampling_fields(body, payload, context.tokenizer)
    if isinstance(body, LlamaInfillBody):
        fields["stop_token_ids"] = end_ids(context)
        prompts, names = [await infill_prompt(body, context)], ["input_prefix"]
    else:
        assert isinstance(body, LlamaCompletionBody)
        prompts, names = await prompts_of(body, context)
    sampling = planning.make_sampling(fields, context, names_of(payload), DEFAULTS)
    planning.check_size(len(prompts), [sampling], names[0], context.config)
    logprobs = LogprobSpec(top=body.n_probs, mode="raw") if body.n_probs else None
    options = Options(adapter=adapter_of(body.model, state), logprobs=logprobs)
    count = len(prompts)
    draft = Draft(
        prompts=prompts,
        names=names,
        samplings=[sampling] * count,
        options=[options] * count,
        owner=owner,
        is_batch=count > 1,
    )
    return plan_of(draft, state)


async def _stream(run: Run, answers: list[CompletionAnswer]) -> AsyncGenerator[bytes, None]:
    """Yield an event for each update with new text, and one at the end of each output."""
    async with aclosing(run.events(interval=1)) as events:
        async for update in events:
            check_complete(update.output)
            answer = answers[update.output.index]
            for part in answer.new_parts():
                yield event(_json.encode(part))
