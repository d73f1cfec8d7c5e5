"""Thinking that has a budget: where the model still thinks when it is used up, the end of its thoughts is written for
it, and it goes on with the answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from tureen.api.chat import ChatPlan
from tureen.api.generation import Output, Run
from tureen.api.state import ServerState
from tureen.types import GenerateRequest


async def updates_within(
    plan: ChatPlan, budget: int, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    """As Run.updates for a plan of one request; the thinking has at most `budget` tokens."""
    [request] = plan.plan.requests
    first = msgspec.structs.replace(request, max_new_tokens=min(budget, request.max_new_tokens))
    going_on = None
    async with contextlib.aclosing(_updates(plan, first, state, interval)) as updates:
        async for output in updates:
            going_on = _cut_short(output, request, plan)
            if going_on is None:
                yield output
    if going_on is None:
        return
    yield output
    whole_text, whole_ids = output.text, list(output.token_ids)
    async with contextlib.aclosing(_updates(plan, going_on, state, interval)) as updates:
        async for more in updates:
            output.text, output.token_ids = whole_text + more.text, whole_ids + more.token_ids
            output.elapsed_s, output.finish = more.elapsed_s, more.finish
            yield output


def _updates(
    plan: ChatPlan, request: GenerateRequest, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    asked = msgspec.structs.replace(plan.plan, requests=(request,), media=list(plan.plan.media))
    return Run(state, asked).updates(interval)


def _cut_short(output: Output, request: GenerateRequest, plan: ChatPlan) -> GenerateRequest | None:
    """Ends the thoughts of an output that has used up its budget with them, and returns what asks for the rest; None
    where there is nothing to do."""
    form, finish = plan.reasoning, output.finish
    if form is None or finish is None or finish.type != "length" or form.end in output.text:
        return None
    if not (plan.starts_inside or output.text.lstrip().startswith(form.begin)):
        return None
    mark = f"\n{form.end}\n\n"
    mark_ids = plan.tokenizer.encode(mark, add_special_tokens=False)
    left = request.max_new_tokens - len(output.token_ids) - len(mark_ids)
    if left < 1:
        return None
    output.text += mark
    output.token_ids += mark_ids
    output.finish = None
    least = max(0, request.params.min_new_tokens - len(output.token_ids))
    grammar = request.grammar
    return msgspec.structs.replace(
        request,
        token_ids=(*request.token_ids, *output.token_ids),
        max_new_tokens=left,
        params=msgspec.structs.replace(request.params, min_new_tokens=least),
        grammar=None if grammar is None else msgspec.structs.replace(grammar, after=""),
    )
