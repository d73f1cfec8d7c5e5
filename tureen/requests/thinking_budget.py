"""Limits the tokens that a model may think: when the budget is used up, the mark that ends the reasoning is appended
to its output, and it goes on with the answer. Generation is stopped and started again once for that."""

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
    """Yields events as `Run.events` does, for a plan of one request. The reasoning has at most `budget` tokens, and
    fewer where the answer would have none left."""
    reader = plan.reading.reader()
    async with contextlib.aclosing(_updates_within(plan, budget, state, interval)) as updates:
        async for output in updates:
            yield OutputEvent(output, reader.catch_up(output), reader)


async def _updates_within(
    plan: Plan, budget: int, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    """Yields outputs as `Run.updates` does, with the budget of `events_within`."""
    [request] = plan.requests
    bound = min(budget, max(1, request.max_new_tokens - len(_mark(plan, state)[1]) - 1))
    if plan.reading.reasoning is None or (request.grammar is not None and not plan.reading.starts_inside):
        bound = request.max_new_tokens  # no reasoning: there is none, or a grammar holds from the first token
    if bound < request.max_new_tokens:  # prompt and reasoning may be computed again, so they are reserved twice
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
        async for update in updates:
            output.text, output.token_ids = whole_text + update.text, whole_ids + update.token_ids
            output.elapsed_s, output.finish, output.conformity = update.elapsed_s, update.finish, update.conformity
            yield output


def _updates(
    plan: Plan, request: GenerateRequest, state: ServerState, interval: int | None
) -> AsyncGenerator[Output, None]:
    single = msgspec.structs.replace(plan, requests=(request,), media=list(plan.media))
    return Run(state, single).updates(interval)


def _mark(plan: Plan, state: ServerState) -> tuple[str, list[int]]:
    """Returns the text that ends the reasoning, and its token ids."""
    text = "" if plan.reading.reasoning is None else f"\n{plan.reading.reasoning.end}\n\n"
    return text, list(state.context.tokenizer.encode(text, add_special_tokens=False)) if text else []


def _is_thinking(output: Output, plan: Plan) -> bool:
    form = plan.reading.reasoning
    if form is None or form.end in output.text:
        return False
    return plan.reading.starts_inside or output.text.lstrip().startswith(form.begin)


def _going_on(output: Output, request: GenerateRequest, plan: Plan, state: ServerState) -> GenerateRequest | None:
    """Appends the end of the reasoning to an output that used up its budget, and returns the request for the rest.

    Returns None, and changes nothing, when the output ended by itself or no token is left.
    """
    if output.finish is None or output.finish.type != "length":
        return None
    is_thinking = _is_thinking(output, plan)
    if not is_thinking and request.grammar is not None:
        return None  # the grammar's output has begun and cannot be resumed
    mark, mark_ids = _mark(plan, state) if is_thinking else ("", [])
    num_left = request.max_new_tokens - len(output.token_ids) - len(mark_ids)
    if num_left < 1:
        return None
    output.text += mark
    output.token_ids += mark_ids
    output.finish = None
    min_new_tokens = max(0, request.params.min_new_tokens - len(output.token_ids))
    grammar = request.grammar
    return msgspec.structs.replace(
        request,
        id=state.new_id(output.rid),
        token_ids=(*request.token_ids, *output.token_ids),
        max_new_tokens=num_left,
        params=msgspec.structs.replace(request.params, min_new_tokens=min_new_tokens),
        grammar=None if grammar is None else msgspec.structs.replace(grammar, after=""),
    )
