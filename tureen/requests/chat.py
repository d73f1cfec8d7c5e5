"""The one path of chats: any API's messages become a prompt, and the output becomes reasoning, text and tool calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tureen.contract.params import CONSTRAINTS
from tureen.contract.types import LogprobSpec
from tureen.errors import InvalidRequest
from tureen.log import get_logger
from tureen.requests import planning
from tureen.requests.chat_prompt import ChatPrompt, chat_prompt
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.loading import loading
from tureen.requests.offload import offload
from tureen.requests.planning import Names, Sampling
from tureen.requests.reading import Reading
from tureen.requests.state import Context, ServerState
from tureen.text.messages import Message, Tool, ToolChoice
from tureen.text.reasoning import ReasoningFormat
from tureen.text.tools import ToolFormat, constraint, schema_places

TO_THE_END: Mapping[str, Any] = MappingProxyType({"max_new_tokens": None})

TOOL_SIZE = 256
"""Characters that are tokenized in the time in which a tool's call is described."""

log = get_logger("api")


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for, its form already checked."""

    messages: tuple[Message, ...]
    field: str = "messages"  # what the API calls them
    pictures: tuple[str, ...] = ()  # references, one for each {"type": "image"} in order
    videos: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    schema_field: str = "tools[{}].function.parameters"  # what the API calls the schema of a tool
    grammar_field: str = "tools[{}].custom.format.grammar.definition"  # and the grammar of a custom one
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    continue_final_message: bool = False  # the last message, the assistant's, goes on
    template_kwargs: Mapping[str, Any] = {}
    separate_reasoning: bool = True
    sampling: Mapping[str, Any] = {}  # what the body sets, by the names of SamplingParams; n among them
    defaults: Mapping[str, Any] = TO_THE_END  # the API's own
    clip_max_tokens: bool = False  # where the context holds fewer tokens than max_new_tokens, it ends the answer
    names: Names = Names()  # what the API calls them
    logprobs: LogprobSpec | None = None
    adapter: str = ""  # see model_field
    priority: int = 0
    cache_salt: str = ""
    processor: str = ""
    rid: str | None = None
    deadline_ms: int | None = None
    ttft_deadline_ms: int | None = None
    log_metrics: bool = True


async def prepare(chat: Chat, state: ServerState, *, owner: str = "") -> Plan:
    """Raises InvalidRequest and the errors of what it brings (pictures, adapters); nothing has been submitted then."""
    arrived_s = time.monotonic()
    state.check_accepting()
    context = state.context
    planning.check_priority(chat.priority, context)
    calling = await offload.run(TOOL_SIZE * len(chat.tools), lambda: _calling(chat, context))
    sampling = await planning.sampling_of(calling.sampling, context, calling.names, chat.defaults)
    count = planning.check_size(1, [sampling], chat.field)
    prompt = await _prompt(chat, calling.tools, state, owner, count)
    reasoning, starts_inside = context.reasoning_format, False
    if reasoning is not None:
        starts_inside = _starts_inside(chat, prompt.text, reasoning)
        if starts_inside and any(getattr(sampling.params, name) is not None for name in CONSTRAINTS):
            later = {"grammar_after": reasoning.end, **calling.sampling}
            sampling = await planning.sampling_of(later, context, calling.names, chat.defaults)
    if prompt.num_neutralised:
        state.metrics.add("num_neutralised_tokens", prompt.num_neutralised)
        log.info("%d control tokens in messages of a client were taken as text", prompt.num_neutralised)
    reading = Reading(
        tools=calling.tools,
        tool_format=calling.format,
        parallel=chat.parallel_tool_calls,
        reasoning=reasoning,
        separate_reasoning=chat.separate_reasoning,
        starts_inside=starts_inside,
        num_neutralised=prompt.num_neutralised,
    )
    plan = _plan(chat, prompt, sampling, calling, state, owner=owner, arrived_s=arrived_s)
    return msgspec.structs.replace(plan, reading=reading)


class Calling(NamedTuple):
    """How a chat's tools are used."""

    tools: tuple[Tool, ...]  # that the model may call
    format: ToolFormat | None  # None without tools
    sampling: Mapping[str, Any]  # what the body sets, with what makes the output honour how tools are to be used
    names: Names
    places: Mapping[str, str] = {}  # what errors about the output's grammar call a schema -> what the client does


def _calling(chat: Chat, context: Context) -> Calling:
    """Raises InvalidRequest."""
    sampling = dict(chat.sampling)
    templates = context.chat_templates
    if not isinstance(templates, str) and templates.end_id is not None:
        sampling["stop_token_ids"] = (*sampling.get("stop_token_ids", ()), templates.end_id)
    reasoning = context.reasoning_format
    if reasoning is not None and reasoning.is_special:
        _keep_special_tokens(sampling, chat, "reasoning" if chat.separate_reasoning else None)
    if not chat.tools or chat.tool_choice.mode == "none":
        return Calling((), None, sampling, chat.names)
    form = context.tool_format
    if form is None:
        raise InvalidRequest("tools: the server runs with --tool-call-parser none; leave them out", field="tools")
    if form.SPECIAL:
        _keep_special_tokens(sampling, chat, "calls of tools")
    tag = constraint(form, chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls)
    if tag is None:
        return Calling(chat.tools, form, sampling, chat.names)
    taken = next((name for name in CONSTRAINTS if sampling.get(name) is not None), None)
    if taken is not None:
        field = chat.names.path(taken)
        raise InvalidRequest(
            f"{field} cannot go with tools that must be called a certain way (tool_choice, strict, or "
            "parallel_tool_calls: false): both say what the output is; send one",
            field=field,
        )
    names = chat.names._replace(renamed={**chat.names.renamed, "structural_tag": "tools"})
    places = schema_places(tag, chat.tools, chat.tool_choice, chat.schema_field, chat.grammar_field)
    called = [tool for tool in chat.tools if chat.tool_choice.name in (None, tool.name)]
    strict = bool(sampling.get("strict_schema")) or any(tool.strict for tool in called)
    return Calling(chat.tools, form, sampling | {"structural_tag": tag, "strict_schema": strict}, names, places)


def _keep_special_tokens(sampling: dict[str, Any], chat: Chat, marked: str | None) -> None:
    """In the text: some mark what is read from it. Raises InvalidRequest where that is needed and not wanted."""
    if sampling.setdefault("skip_special_tokens", False) and marked is not None:
        field = chat.names.path("skip_special_tokens")
        raise InvalidRequest(
            f"{field}: true would hide the special tokens that mark this model's {marked}; leave it out", field=field
        )


async def _prompt(chat: Chat, tools: Sequence[Tool], state: ServerState, owner: str, count: int) -> ChatPrompt:
    async with contextlib.AsyncExitStack() as stack:
        if chat.pictures or chat.videos:
            names, _ = planning.name_requests(chat.rid, 1, count, is_batch=False)
            limits = {"deadline_ms": chat.deadline_ms, "ttft_deadline_ms": chat.ttft_deadline_ms}
            await stack.enter_async_context(loading(state, owner, names, limits))
        return await chat_prompt(
            chat.messages,
            tools,
            state,
            field=chat.field,
            pictures=chat.pictures,
            videos=chat.videos,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_kwargs,
        )


def _starts_inside(chat: Chat, prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether what follows the prompt is reasoning, mark or not. A message that is continued says so itself."""
    if chat.continue_final_message:
        last = chat.messages[-1]
        content = last["content"]
        own = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if last.get("reasoning_content") or reasoning.end in own:
            return False
        if reasoning.begin in own:
            return True
    end = prompt.rstrip()
    return not end.endswith(reasoning.end) and (reasoning.starts_inside or end.endswith(reasoning.begin))


def _plan(
    chat: Chat,
    prompt: ChatPrompt,
    sampling: Sampling,
    calling: Calling,
    state: ServerState,
    *,
    owner: str,
    arrived_s: float,
) -> Plan:
    waited_ms = round((time.monotonic() - arrived_s) * 1000)

    def left(limit_ms: int | None) -> int | None:
        return None if limit_ms is None else max(1, limit_ms - waited_ms)

    options = Options(
        adapter=chat.adapter,
        logprobs=chat.logprobs,
        processor=chat.processor,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
        deadline_ms=left(chat.deadline_ms),
        ttft_deadline_ms=left(chat.ttft_deadline_ms),
    )
    if chat.clip_max_tokens:  # as one that the request does not ask for
        sampling = sampling._replace(origins={**sampling.origins, "max_new_tokens": "default"})
    draft = one_prompt(
        prompt.prompt,
        chat.field,
        sampling,
        options,
        owner=owner,
        rid=chat.rid,
        log_metrics=chat.log_metrics,
        arrived_s=arrived_s,
        places=calling.places,
    )
    return plan_of(draft, state)
