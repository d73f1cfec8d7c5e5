"""SGLang's dialect: `/generate`, its answers and events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tureen.api import sglang_request
from tureen.api.body import read_json
from tureen.api.dialect import unless_gone
from tureen.api.errors import error_object
from tureen.api.generation import Output, Run, tokenize
from tureen.api.sglang_request import Plan, Texts
from tureen.api.sse import DONE, EventStream, event
from tureen.api.state import Context, ServerState
from tureen.errors import TureenError
from tureen.types import FinishReason, TokenLogprob

Answer = dict[str, Any]

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Route]:
    async def generate(request: Request) -> ASGIApp:
        given = read_json(request.headers.get("content-type"), await request.body())
        plan = await prepare(given, state.context)
        if plan.stream:
            answers = stream(plan, state)
            first = await unless_gone(request, anext(answers))
            return EventStream(_events(first, answers))
        whole = await unless_gone(request, answer(plan, state))
        return Response(_json.encode(whole), media_type="application/json")

    return [Route("/generate", generate, methods=["POST", "PUT"])]


async def prepare(given: dict[str, Any], context: Context) -> Plan:
    """A body becomes requests. Raises InvalidRequest; nothing has been submitted then."""
    body, prompts = sglang_request.parse(given, context)
    if isinstance(prompts, Texts):
        prompts = await tokenize(*prompts, context.tokenizer, max_tokens=context.capacity)
    return sglang_request.plan(body, prompts, context)


async def answer(plan: Plan, state: ServerState) -> Answer | list[Answer]:
    """The whole answer: an object, or a list of them for a batch or n > 1."""
    outputs = await _run(plan, state).whole()
    answers = [render(output, plan, state.context) for output in outputs]
    return answers if plan.is_list else answers[0]


async def stream(plan: Plan, state: ServerState) -> AsyncGenerator[Answer, None]:
    """The answer as it grows, an object per event; cumulative unless the server was told otherwise."""
    config = state.context.config
    async with contextlib.aclosing(_run(plan, state).updates()) as updates:
        async for output in updates:
            interval = output.request.params.stream_interval or config.stream_interval
            num_new = len(output.token_ids) - output.sent_tokens
            if output.finish is None and output.sent_tokens and num_new < interval:
                continue
            one = render(output, plan, state.context, only_new=config.incremental_streaming_output)
            if plan.is_list:
                one["index"] = output.index
            output.sent_tokens, output.sent_chars = len(output.token_ids), len(output.text)
            yield one


def _run(plan: Plan, state: ServerState) -> Run:
    return Run(state, plan.requests, plan.rids, plan.names, log_metrics=plan.log_metrics)


async def _events(first: Answer, rest: AsyncGenerator[Answer, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(rest):
            yield event(_json.encode(first))
            async for one in rest:
                yield event(_json.encode(one))
    except TureenError as error:
        yield event(_json.encode(error_object(error)))
    yield DONE


def render(output: Output, plan: Plan, context: Context, *, only_new: bool = False) -> Answer:
    """One request's answer as SGLang writes it. `only_new` leaves out what was sent before."""
    first_token, first_char = (output.sent_tokens, output.sent_chars) if only_new else (0, 0)
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": finish_reason(output.finish),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.usage.cached_tokens,
        "sampling_seed": output.request.seed,
        "weight_version": context.config.weight_version,
    }
    if output.finish is not None:
        meta["e2e_latency"] = output.elapsed_s
    spec = output.request.logprobs
    if spec is not None:
        prompt = [] if first_token else output.prompt_logprobs  # they come with the first token
        sides = (("input", prompt), ("output", output.output_logprobs[first_token:]))
        for side, positions in sides:
            meta[f"{side}_token_logprobs"] = [_triple(p.token, plan, context) for p in positions]
            if spec.top:
                meta[f"{side}_top_logprobs"] = [_triples(p.top, plan, context) for p in positions]
            if spec.token_ids:
                meta[f"{side}_token_ids_logprobs"] = [_triples(p.token_ids, plan, context) for p in positions]
    return {"text": output.text[first_char:], "output_ids": output.token_ids[first_token:], "meta_info": meta}


def _triple(logprob: TokenLogprob, plan: Plan, context: Context) -> list[Any]:
    value, token_id = logprob
    return [value, token_id, context.tokenizer.token_text(token_id) if plan.return_text_in_logprobs else None]


def _triples(logprobs: Sequence[TokenLogprob] | None, plan: Plan, context: Context) -> list[list[Any]] | None:
    return None if logprobs is None else [_triple(one, plan, context) for one in logprobs]


def finish_reason(finish: FinishReason | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": finish.length}
    return {"type": "abort", "message": finish.message, "reason": finish.reason}
