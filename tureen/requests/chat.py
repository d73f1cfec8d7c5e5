"""Turns any API's chat into requests: messages become a prompt, and tools become a grammar. Decides how to parse the
output into reasoning, text and tool calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tureen.contract.params import CONSTRAINTS
from tureen.contract.types import HiddenStates, LogprobSpec
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.grammar.base import GrammarSpec
from tureen.log import get_logger
from tureen.media.base import Modality
from tureen.requests import planning, tokenising
from tureen.requests.answer_format import AnswerFormat, answer_format
from tureen.requests.chat_prompt import ChatMedia, ChatPrompt, chat_prompt
from tureen.requests.drafts import Options, Plan, one_prompt, plan_of
from tureen.requests.media_fields import loading
from tureen.requests.offload import offload
from tureen.requests.output_parser import Reading
from tureen.requests.planning import Names, Sampling
from tureen.requests.prompts import id_lists, last_tokens
from tureen.requests.state import Context, ServerState
from tureen.text.messages import Message, Tool, ToolChoice
from tureen.text.reasoning import ReasoningFormat
from tureen.text.tools import PARSERS, ToolFormat, calls_or, constraint, schema_fields

TO_THE_END: Mapping[str, Any] = MappingProxyType({"max_new_tokens": None})
"""Default of chat APIs: an answer may extend to the end of the context."""

NUM_END_TOKENS = 32
"""Number of tokens at the end of a prompt of token ids that are searched for a mark of reasoning."""

TOOL_SIZE = 256
"""Cost of one tool for `offload`: the grammar of its calls takes as long as tokenizing this many characters."""

log = get_logger("api")


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request, independent of its API. The form of its fields is already checked."""

    messages: tuple[Message, ...]
    field: str = "messages"  # the API's name for the messages, for errors
    prompt_ids: Sequence[int] | None = None  # token ids instead of a rendered prompt
    max_prompt_tokens: int | None = None  # maximum; only the last tokens of a longer prompt are kept
    pictures: tuple[str, ...] = ()  # URLs, data URLs or paths, one for each {"type": "image"} in order
    videos: tuple[str, ...] = ()
    modality: Modality | None = None  # of the pictures; None: their number decides
    tools: tuple[Tool, ...] = ()
    schema_field: str = "tools[{}].function.parameters"  # the API's name for a tool's schema, by index
    grammar_field: str = "tools[{}].custom.format.grammar.definition"  # the API's name for a custom tool's grammar
    tool_places: tuple[int, ...] = ()  # index of each tool in the client's list; (): as in `tools`
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    continue_final_message: bool = False  # the answer continues the last message, the assistant's
    template_kwargs: Mapping[str, Any] = {}
    separate_reasoning: bool = True

    sampling: Mapping[str, Any] = {}  # parameters that the body sets, by the names of SamplingParams; n among them
    defaults: Mapping[str, Any] = TO_THE_END  # the API's own, by the same names
    clip_max_tokens: bool = False  # max_new_tokens beyond the context's end is lowered to it, not refused
    names: Names = Names()  # the API's names for sampling parameters
    logprobs: LogprobSpec | None = None
    hidden_states: HiddenStates = "none"
    adapter: str = ""  # LoRA adapter; "" = the model itself
    priority: int = 0
    cache_salt: str = ""
    processor: str = ""
    return_effective: bool = False
    explain: bool = False
    reports_progress: bool = False
    rid: str | None = None
    deadline_ms: int | None = None
    ttft_deadline_ms: int | None = None
    log_metrics: bool = True


async def prepare(chat: Chat, state: ServerState, *, owner: str = "") -> Plan:
    """Renders, tokenizes and checks a chat, and returns the requests to run; nothing is submitted yet.

    `owner`: the client, which alone may abort the requests by name. Raises Unavailable when the server takes no work,
    InvalidRequest, Forbidden for pictures that may not be fetched.
    """
    arrived_s = time.monotonic()
    state.check_accepting()
    context = state.context
    planning.check_priority(chat.priority, context)
    setup = await offload.run(TOOL_SIZE * len(chat.tools), lambda: _tool_setup(chat, context))
    sampling = await planning.sampling_of(setup.sampling, context, setup.names, chat.defaults)
    count = planning.check_size(1, [sampling], chat.field, context.config)
    prompt = await _prompt(chat, setup.tools, state, owner, count)
    reasoning, starts_inside = context.reasoning_format, False
    if reasoning is not None:
        starts_inside = _starts_inside(chat, prompt.text, reasoning)
        if starts_inside and any(getattr(sampling.params, name) is not None for name in CONSTRAINTS):
            later = {"grammar_after": reasoning.end + reasoning.answer, **setup.sampling}
            sampling = await planning.sampling_of(later, context, setup.names, chat.defaults)
    if prompt.num_neutralised:
        state.metrics.add("num_neutralised_tokens", prompt.num_neutralised)
        log.info("%d control tokens in a client's messages were treated as text", prompt.num_neutralised)
    reading = Reading(
        tools=setup.tools,
        tool_format=setup.format,
        parallel=chat.parallel_tool_calls,
        reasoning=reasoning,
        separate_reasoning=chat.separate_reasoning,
        starts_inside=starts_inside,
        num_neutralised=prompt.num_neutralised,
        answer=setup.answer,
    )
    plan = _plan(chat, prompt, sampling, setup, state, owner=owner, arrived_s=arrived_s)
    return msgspec.structs.replace(plan, reading=reading)


async def prompt_of(chat: Chat, state: ServerState, *, owner: str = "") -> ChatPrompt:
    """Renders and tokenizes a chat as `prepare` does, and checks its tools; nothing is to run. Raises as `prepare`."""
    setup = await offload.run(TOOL_SIZE * len(chat.tools), _tool_setup, chat, state.context)
    return await _prompt(chat, setup.tools, state, owner, 1)


class ToolSetup(NamedTuple):
    """How a chat's tools shape its prompt and its sampling."""

    tools: tuple[Tool, ...]  # tools that the model may call
    format: ToolFormat | None  # None without tools, unless its parser also extracts the reasoning
    sampling: Mapping[str, Any]  # the body's parameters, and a grammar where tool_choice, strict or parallel need one
    names: Names
    error_fields: Mapping[str, str] = {}  # a schema's path in errors about the grammar -> the client's field
    answer: GrammarSpec | None = None  # for the final check of an output that is not a call


def _tool_setup(chat: Chat, context: Context) -> ToolSetup:
    """Raises InvalidRequest for tools that this server cannot honour."""
    sampling = dict(chat.sampling)
    templates = context.chat_templates
    if not isinstance(templates, str):
        for name, ends in (("stop_token_ids", templates.end_ids), ("stop", templates.stops)):
            if ends:
                sampling[name] = (*sampling.get(name, ()), *ends)
    reasoning = context.reasoning_format
    if reasoning is not None and reasoning.is_special:
        _keep_special_tokens(sampling, chat, "reasoning" if chat.separate_reasoning else None)
    if not chat.tools or chat.tool_choice.mode == "none":
        form = PARSERS.get(reasoning.calls) if reasoning is not None else None
        return ToolSetup((), form, sampling, chat.names)
    form = context.tool_format
    if form is None:
        raise InvalidRequest("tools: the server runs with --tool-call-parser none; leave them out", field="tools")
    if form.SPECIAL:
        _keep_special_tokens(sampling, chat, "calls of tools")
    answer = None
    if chat.tool_choice.mode == "auto":
        answer = answer_format(sampling, chat.names, unicode_classes=context.config.regex_unicode)
    return _calls(chat, form, sampling) if answer is None else _calls_or_answer(chat, form, sampling, answer)


def _calls(chat: Chat, form: ToolFormat, sampling: dict[str, Any]) -> ToolSetup:
    """Returns the setup of a chat in which only tools may need a grammar. Raises InvalidRequest."""
    tag = constraint(form, chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls)
    if tag is None:
        return ToolSetup(chat.tools, form, sampling, chat.names)
    if sampling.get("structural_tag") is not None:
        field = chat.names.path("structural_tag")
        raise InvalidRequest(
            f"{field} cannot go with tools that must be called a certain way (tool_choice, strict, or "
            "parallel_tool_calls: false): both define the output; send one",
            field=field,
        )
    called = [tool for tool in chat.tools if chat.tool_choice.name in (None, tool.name)]
    strict = any(tool.strict for tool in called)
    if all(sampling.get(name) is None for name in CONSTRAINTS):
        strict = strict or bool(sampling.get("strict_schema"))
    for name in CONSTRAINTS:  # the constraint of an answer does not apply to calls
        if sampling.pop(name, None) is not None:
            ignored.tell(chat.names.path(name), "tool_choice requires calls, so there is no answer to constrain")
    names = chat.names._replace(renamed={**chat.names.renamed, "structural_tag": "tools"})
    error_fields = _error_fields(tag, chat)
    return ToolSetup(chat.tools, form, sampling | {"structural_tag": tag, "strict_schema": strict}, names, error_fields)


def _calls_or_answer(chat: Chat, form: ToolFormat, sampling: dict[str, Any], answer: AnswerFormat) -> ToolSetup:
    """Returns the setup of a chat whose output is calls, or else an answer as `answer` defines it."""
    is_strict, has_strict = bool(sampling.get("strict_schema")), any(tool.strict for tool in chat.tools)
    layout = answer.not_strict() if has_strict and not is_strict else answer.layout
    tag = calls_or(form, chat.tools, layout, parallel=chat.parallel_tool_calls)
    names = chat.names._replace(renamed={**chat.names.renamed, "structural_tag": "tools"})
    error_fields = _error_fields(tag, chat)
    error_fields |= {f"structural_tag.format.elements[1].{answer.place}": chat.names.path(answer.parameter)}
    strict = is_strict or has_strict
    del sampling[answer.parameter]
    sampling |= {"structural_tag": tag, "strict_schema": strict}
    return ToolSetup(chat.tools, form, sampling, names, error_fields, answer.spec)


def _error_fields(tag: Mapping[str, Any], chat: Chat) -> dict[str, str]:
    """Returns a path in the calls' grammar -> the client's field, which errors name."""
    return schema_fields(tag, chat.tools, chat.tool_choice, chat.schema_field, chat.grammar_field, chat.tool_places)


def _keep_special_tokens(sampling: dict[str, Any], chat: Chat, marked: str | None) -> None:
    """Keeps special tokens in the output's text, where parsers look for them.

    Raises InvalidRequest if the body skips special tokens although they mark `marked`.
    """
    if sampling.setdefault("skip_special_tokens", False) and marked is not None:
        field = chat.names.path("skip_special_tokens")
        raise InvalidRequest(
            f"{field}: true would hide the special tokens that mark this model's {marked}; leave it out", field=field
        )


async def _prompt(chat: Chat, tools: Sequence[Tool], state: ServerState, owner: str, count: int) -> ChatPrompt:
    """Returns the prompt of a chat. `count`: samples. Raises InvalidRequest, Forbidden."""
    if chat.prompt_ids is None:
        rendered = await _rendered_prompt(chat, tools, state, owner, count)
    else:
        is_cut = chat.max_prompt_tokens is not None
        ids = id_lists(list(chat.prompt_ids), state.context, may_be_empty=False, field=chat.field, may_be_cut=is_cut)
        [prompt] = await tokenising.resolve(ids, [chat.field], state)
        end = state.context.tokenizer.decode(prompt.token_ids[-NUM_END_TOKENS:], skip_special_tokens=False)
        rendered = ChatPrompt(prompt, end, 0)
    return rendered._replace(prompt=last_tokens(rendered.prompt, chat.max_prompt_tokens, "truncate_prompt_tokens"))


async def _rendered_prompt(chat: Chat, tools: Sequence[Tool], state: ServerState, owner: str, count: int) -> ChatPrompt:
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
            media=ChatMedia(chat.pictures, chat.videos, chat.modality),
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_kwargs,
        )


def _starts_inside(chat: Chat, prompt: str, reasoning: ReasoningFormat) -> bool:
    """Returns whether the output begins inside the reasoning, without its opening mark.

    The text of a continued message decides; otherwise the end of the prompt or the model's format.
    """
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
    setup: ToolSetup,
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
        hidden_states=chat.hidden_states,
        processor=chat.processor,
        return_effective=chat.return_effective,
        explain=chat.explain,
        reports_progress=chat.reports_progress,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
        deadline_ms=left(chat.deadline_ms),
        ttft_deadline_ms=left(chat.ttft_deadline_ms),
    )
    if chat.clip_max_tokens:  # drafts.py lowers a default to what fits, and refuses a request's own value
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
        error_fields=setup.error_fields,
    )
    return plan_of(draft, state)
