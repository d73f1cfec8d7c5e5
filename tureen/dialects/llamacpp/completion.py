"""Serves `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

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
from tureen.requests.generation import TIME_LIMIT, WHOLE_INTERVAL, Output, Run
from tureen.requests.model_field import adapter_of
from tureen.requests.offload import offload
from tureen.requests.state import ServerState

B = TypeVar("B", bound=LlamaOptions)

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Return the routes."""

    async def complete(request: Request) -> ASGIApp:
        payload, body = await _read(request, LlamaCompletionBody)
        return await _respond(body, payload, request, state)

    async def infill(request: Request) -> ASGIApp:
        payload, body = await _read(request, LlamaInfillBody)
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


async def _read(request: Request, kind: type[B]) -> tuple[dict[str, Any], B]:
    return await read_body_with(request, lambda sent: (sent, parse(sent, kind)), of_any_type=True)


async def _respond(body: LlamaOptions, payload: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    state.check_accepting()
    plan = await prepared(request, _plan(body, payload, client_name(request), state))
    run = Run(state, plan)
    answers = [CompletionAnswer(output, body, state.context) for output in run.outputs]
    if body.stream:
        return await streamed(
            request,
            _stream(_updates(run, body, state), answers),
            lambda error: event(_json.encode(error_object(error))),
        )
    await unless_gone(request, _ended(_updates(run, body, state)))
    size = sum(output.num_logprobs for output in run.outputs)
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
    progress = body.stream and body.return_progress
    options = Options(adapter=adapter_of(body.model, state), logprobs=logprobs, reports_progress=progress)
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


async def _updates(run: Run, body: LlamaOptions, state: ServerState) -> AsyncGenerator[Output, None]:
    """Yield the updates of the outputs. End an output at its first line break after `t_max_predict_ms`, counted from
    its first token. Raises RequestFailed for an output that was aborted."""
    has_limit = body.t_max_predict_ms > 0
    num_read = dict.fromkeys(range(len(run.outputs)), 0)  # characters of each output in which a line break was sought
    async with aclosing(run.updates(1 if body.stream or has_limit else WHOLE_INTERVAL)) as updates:
        async for output in updates:
            is_new_line = has_limit and output.text.find("\n", num_read[output.index]) >= 0
            num_read[output.index] = len(output.text)
            if is_new_line and output.finish is None and _is_late(output, body.t_max_predict_ms):
                state.client.abort(output.request.id, TIME_LIMIT)
            check_complete(output)
            yield output


def _is_late(output: Output, limit_ms: int) -> bool:
    first = output.remarks.first
    return limit_ms > 0 and first is not None and output.elapsed_s - first[0] > limit_ms / 1000


async def _ended(updates: AsyncGenerator[Output, None]) -> None:
    """Wait until all outputs have ended."""
    async with aclosing(updates):
        async for _ in updates:
            pass


async def _stream(
    updates: AsyncGenerator[Output, None], answers: list[CompletionAnswer]
) -> AsyncGenerator[bytes, None]:
    """Yield an event for each update with new text, and one at the end of each output."""
    async with aclosing(updates):
        async for output in updates:
            for part in answers[output.index].new_parts():
                yield event(_json.encode(part))
