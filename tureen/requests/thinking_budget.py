"""Limits the tokens of reasoning. When the budget is used up, the end mark of the reasoning is appended to the output,
and the model continues with the answer. Generation is stopped and restarted once for that."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec

from tureen.clients.quotas import current_work
from tureen.contract.types import Explanation, GenerateRequest, LaterGrammar
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output, OutputEvent, Run, most_tokens
from tureen.requests.state import ServerState


class ReasoningBudget(NamedTuple):
    """The maximum number of reasoning tokens, and the client's name for it."""

    tokens: int
    field: str


class BudgetedRun:
    """Runs a plan of one request with a limit on the tokens of its reasoning. Lowers the limit if no tokens would be
    left for the answer."""

    def __init__(self, state: ServerState, plan: Plan, budget: ReasoningBudget) -> None:
        [request] = plan.requests
        num_mark = len(_mark(plan, state)[1])
        bound = min(budget.tokens, max(1, request.max_new_tokens - num_mark - 1), request.max_new_tokens)
        if plan.reading.reasoning is None or (request.grammar is not None and not plan.reading.starts_inside):
            bound = request.max_new_tokens  # no reasoning: there is none, or a grammar holds from the first token
        later = _later(request, num_mark, state)
        first = request if bound == request.max_new_tokens else _thoughts_of(request, bound, plan, later)
        self._state, self._plan, self._request, self._bound = state, plan, request, bound
        self._run = _run_of(plan, first, state)
        self.outputs = self._run.outputs

    def abort(self, reason: str) -> None:
        """Aborts the request if it has not ended; `reason` is in its finish reason."""
        self._run.abort(reason)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens that it may use. Prompt and reasoning may be recomputed, so they count twice."""
        request, index = self._request, self._plan.first_index
        twice = len(request.token_ids) + self._bound if self._bound < request.max_new_tokens else 0
        return most_tokens(request, index) + twice

    async def events(self, interval: int | None = None) -> AsyncGenerator[OutputEvent, None]:
        """Yields events as `Run.events` does."""
        reader = self._plan.reading.reader()
        async with contextlib.aclosing(self._updates(interval)) as updates:
            async for output in updates:
                yield OutputEvent(output, reader.catch_up(output), reader)

    async def _updates(self, interval: int | None) -> AsyncGenerator[Output, None]:
        """Yields outputs as `Run.updates` does."""
        request, going_on = self._request, None
        current_work().begin(self.most_tokens)
        async with contextlib.aclosing(self._run.updates(interval)) as updates:
            async for output in updates:
                going_on = _going_on(output, request, self._plan, self._state)
                if going_on is None:
                    yield output
        if going_on is None:
            return
        if request.logprobs is None:  # the mark gets its log-probabilities when the rest begins
            yield output
        whole = output.snapshot()
        reading = msgspec.structs.replace(self._plan.reading, reasoning=None, starts_inside=False)
        self._run = _run_of(msgspec.structs.replace(self._plan, reading=reading), going_on, self._state)
        async with contextlib.aclosing(self._run.updates(interval)) as updates:
            async for update in updates:
                _extend(output, whole, update)
                yield output


class BudgetedRuns:
    """Runs a plan of several requests with a limit on the reasoning tokens of each. If one fails or the client leaves,
    all of them end."""

    def __init__(self, state: ServerState, plan: Plan, budget: ReasoningBudget) -> None:
        """`budget`: of each request."""
        self._runs = [BudgetedRun(state, _sample_of(plan, index), budget) for index in range(len(plan.requests))]
        self._state, self._owner = state, plan.owner
        self._shared = {name: (0,) for name in plan.names if name not in plan.rids}
        plan.media.clear()
        self.outputs = [output for run in self._runs for output in run.outputs]

    async def events(self, interval: int | None = None) -> AsyncGenerator[OutputEvent, None]:
        """Yields events as `Run.events` does. An output does not continue while the caller handles its event."""
        work = current_work()
        work.begin(sum(run.most_tokens for run in self._runs))
        work.names.update(self._shared)
        arrived: asyncio.Queue[tuple[OutputEvent, asyncio.Event] | asyncio.Task[None]] = asyncio.Queue()

        async def follow(run: BudgetedRun) -> None:
            async with contextlib.aclosing(run.events(interval)) as events:
                async for event in events:
                    was_seen = asyncio.Event()
                    arrived.put_nowait((event, was_seen))
                    await was_seen.wait()

        with self._state.loading(self._owner, self._shared, self._abort):
            tasks = [asyncio.create_task(follow(run)) for run in self._runs]
            for task in tasks:
                task.add_done_callback(arrived.put_nowait)
            num_left = len(tasks)
            try:
                while num_left:
                    item = await arrived.get()
                    if isinstance(item, asyncio.Task):
                        item.result()  # raises the exception that ended it
                        num_left -= 1
                        continue
                    yield item[0]
                    item[1].set()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _abort(self, reason: str) -> None:
        for run in self._runs:
            run.abort(reason)


def budgeted(state: ServerState, plan: Plan, budget: ReasoningBudget) -> BudgetedRun | BudgetedRuns:
    """Returns the run of a plan whose reasoning has at most `budget` tokens."""
    return (BudgetedRun if len(plan.requests) == 1 else BudgetedRuns)(state, plan, budget)


def _sample_of(plan: Plan, index: int) -> Plan:
    """Returns the plan of one of the requests. Its own name also aborts it."""
    rid = plan.rids[index]
    return msgspec.structs.replace(
        plan,
        requests=plan.requests[index : index + 1],
        rids=(rid,),
        names={rid: (0,)},
        media=plan.media[index : index + 1],
        first_index=index,
    )


def _extend(output: Output, whole: Output, update: Output) -> None:
    """Prepends the earlier output, `whole`, to `output`."""
    output.text, output.token_ids = whole.text + update.text, whole.token_ids + update.token_ids
    output.output_logprobs = [*whole.output_logprobs, *update.prompt_logprobs[1:], *update.output_logprobs]
    output.hidden_states = update.hidden_states
    output.versions = whole.versions[:-1]
    num_uncounted = len(whole.token_ids) - sum(count for _, count in whole.versions)  # the mark, and what it cut off
    last = [(version, count + num_uncounted) for version, count in whole.versions[-1:]]
    for version, count in (*last, *update.versions):
        is_same = bool(output.versions) and output.versions[-1][0] == version
        output.versions.append((version, count + (output.versions.pop()[1] if is_same else 0)))
    output.elapsed_s, output.finish = update.elapsed_s, update.finish
    explanations = whole.remarks.explanations + update.remarks.explanations
    first = whole.remarks.first or update.remarks.first
    output.remarks = update.remarks._replace(effective=whole.remarks.effective, explanations=explanations, first=first)


def _later(request: GenerateRequest, num_mark: int, state: ServerState) -> LaterGrammar | None:
    """Returns the constraint of the answer after reasoning and its `num_mark` end tokens. Returns None without a
    constraint, and if the answer may be cut."""
    if request.grammar is None or not request.params.close_early:
        return None
    if request.limit_field:
        room, field = request.max_new_tokens, request.limit_field
        limits = f"{field} {room}"
    else:
        num_prompt = len(request.token_ids)
        room, field = state.context.capacity - num_prompt, request.grammar_field
        limits = f"the context of {state.context.capacity} tokens after the prompt's {num_prompt}"
    return LaterGrammar(msgspec.structs.replace(request.grammar, after=""), max(0, room - num_mark), field, limits)


def _thoughts_of(request: GenerateRequest, bound: int, plan: Plan, later: LaterGrammar | None) -> GenerateRequest:
    """Returns the request for at most `bound` tokens. If a constraint applies after the reasoning, the request ends
    with the reasoning, and the constraint, `later`, applies to the rest."""
    form = plan.reading.reasoning
    if request.grammar is None or form is None:
        return msgspec.structs.replace(request, max_new_tokens=bound)
    params = msgspec.structs.replace(request.params, stop=(*request.params.stop, form.end))
    return msgspec.structs.replace(request, max_new_tokens=bound, params=params, grammar=None, later=later)


def _run_of(plan: Plan, request: GenerateRequest, state: ServerState) -> Run:
    return Run(state, msgspec.structs.replace(plan, requests=(request,), media=list(plan.media)))


def _mark(plan: Plan, state: ServerState) -> tuple[str, list[int]]:
    """Returns the text that ends the reasoning, and its token ids."""
    form = plan.reading.reasoning
    text = "" if form is None else form.end if form.calls else f"\n{form.end}\n\n"
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
    finish, form, ends = output.finish, plan.reading.reasoning, state.context.info.eos_token_ids
    if finish is None or form is None:
        return None
    is_constrained = request.grammar is not None and plan.reading.starts_inside
    has_thought = is_constrained and finish.type == "stop" and finish.matched == form.end
    is_cut_off = is_constrained and finish.type == "stop" and finish.matched in ends  # an answer must follow
    if not has_thought and not is_cut_off and finish.type != "length":
        return None
    mark, mark_ids = _mark(plan, state) if _is_thinking(output, plan) and not has_thought else ("", [])
    num_left = request.max_new_tokens - len(output.token_ids) - len(mark_ids) + is_cut_off
    if num_left < 1:
        return None
    if is_cut_off:
        del output.token_ids[-1], output.output_logprobs[-1:], output.remarks.explanations[-1:]
    output.text += form.end if has_thought and not request.params.no_stop_trim else mark
    if request.explain:
        first = len(request.token_ids) + len(output.token_ids)
        output.remarks.explanations.extend(
            Explanation(token_id=token_id, position=position, chosen_by="budget")
            for position, token_id in enumerate(mark_ids, first)
        )
    output.token_ids += mark_ids
    output.finish = None
    return _rest_of(request, output, len(mark_ids), num_left, state)


def _rest_of(
    request: GenerateRequest, output: Output, num_mark: int, num_left: int, state: ServerState
) -> GenerateRequest:
    """Returns the request for what follows the output, of which the last `num_mark` tokens were not drawn."""
    grammar, token_ids, logprobs = request.grammar, (*request.token_ids, *output.token_ids), request.logprobs
    if logprobs is not None:  # those of the mark, which is a part of the prompt now; the first position has none
        logprobs = msgspec.structs.replace(logprobs, prompt_start=len(token_ids) - num_mark - 1 if num_mark else -1)
    min_new_tokens = max(0, request.params.min_new_tokens - len(output.token_ids))
    left_ms = None if request.deadline_ms is None else max(1, request.deadline_ms - math.ceil(output.elapsed_s * 1000))
    return msgspec.structs.replace(
        request,
        id=state.new_id(output.rid),
        token_ids=token_ids,
        logprobs=logprobs,
        max_new_tokens=num_left,
        params=msgspec.structs.replace(request.params, min_new_tokens=min_new_tokens),
        grammar=None if grammar is None else msgspec.structs.replace(grammar, after=""),
        deadline_ms=left_ms,
        ttft_deadline_ms=None,
    )
