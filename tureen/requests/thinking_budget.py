"""Thinking that has a budget: where the model still thinks when it is used up, the end of its thoughts is written for
it, and it goes on with the answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from tureen.contract.types import GenerateRequest
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output, OutputEvent, Run, most_tokens
from tureen.requests.quotas import current_work
from tureen.requests.state import ServerState


async def events_within(
    plan: Plan, budget: int, state: ServerState, interval: int | None
) -> AsyncGenerator[OutputEvent, None]:
    """As Run.events for a plan of one request; the thinking has at most `budget` tokens, and leaves room for an
    answer."""
    reader = plan.reading.reader()
    async with contextlib.aclosing(_updates_within(plan, budget, state, interval)) as updates:
        async for output in updates:
            yield OutputEvent(output, reader.catch_up(output), reader)


async def _updates_within(
    plan: Plan, budget: int, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    """As Run.updates for a plan of one request; the thinking has at most `budget` tokens, and leaves room for an
    answer."""
    [request] = plan.requests
    bound = min(budget, max(1, request.max_new_tokens - len(_mark(plan, state)[1]) - 1))
    if plan.reading.reasoning is None or (request.grammar is not None and not plan.reading.starts_inside):
        bound = request.max_new_tokens  # nothing is thought: a grammar says what the output is from its first token
    if bound < request.max_new_tokens:  # the prompt and the thoughts may be computed again
        current_work().begin(most_tokens(request, 0) + len(request.token_ids) + bound)
    first = request if bound == request.max_new_tokens else msgspec.structs.replace(request, max_new_tokens=bound)
    going_on = None
    async with contextlib.aclosing(_updates(plan, first, state, interval)) as updates:
        async for output in updates:
            going_on = _going_on(output, request, plan, state)
            if going_on is None:
                yield output
    if going_on is None:
        return
    yield output
    whole_text, whole_ids = output.text, list(output.token_ids)
    async with contextlib.aclosing(_updates(plan, going_on, state, interval)) as updates:
        async for more in updates:
            output.text, output.token_ids = whole_text + more.text, whole_ids + more.token_ids
            output.elapsed_s, output.finish, output.conformity = more.elapsed_s, more.finish, more.conformity
            yield output


def _updates(
    plan: Plan, request: GenerateRequest, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    asked = msgspec.structs.replace(plan, requests=(request,), media=list(plan.media))
    return Run(state, asked).updates(interval)


def _mark(plan: Plan, state: ServerState) -> tuple[str, list[int]]:
    """What is written to end the thoughts, and its token ids."""
    text = "" if plan.reading.reasoning is None else f"\n{plan.reading.reasoning.end}\n\n"
    return text, list(state.context.tokenizer.encode(text, add_special_tokens=False)) if text else []


def _is_thinking(output: Output, plan: Plan) -> bool:
    form = plan.reading.reasoning
    if form is None or form.end in output.text:
        return False
    return plan.reading.starts_inside or output.text.lstrip().startswith(form.begin)


def _going_on(output: Output, request: GenerateRequest, plan: Plan, state: ServerState) -> GenerateRequest | None:
    """Ends the thoughts of an output that has used up its budget with them, and returns what asks for the rest; None
    where there is nothing to do."""
    if output.finish is None or output.finish.type != "length":
        return None
    is_thinking = _is_thinking(output, plan)
    if not is_thinking and request.grammar is not None:
        return None  # of which a part is written
    mark, mark_ids = _mark(plan, state) if is_thinking else ("", [])
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
        id=state.new_id(output.rid),
        token_ids=(*request.token_ids, *output.token_ids),
        max_new_tokens=left,
        params=msgspec.structs.replace(request.params, min_new_tokens=least),
        grammar=None if grammar is None else msgspec.structs.replace(grammar, after=""),
    )
