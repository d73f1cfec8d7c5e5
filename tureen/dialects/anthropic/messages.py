"""Serves Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

Source: https://docs.anthropic.com/en/api/messages, /messages-count-tokens, /messages-streaming, /errors.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.contract.params import EMPTY_IS_UNSET
from tureen.dialects.anthropic.body import NO_THREADS, TABLE, AnthropicBody, AnthropicCountBody, parse
from tureen.dialects.anthropic.conversation import conversation_of
from tureen.dialects.anthropic.tools import check_edits, tools_of
from tureen.errors import ContextExceeded, InvalidRequest, TureenError, echo
from tureen.fields import ignored
from tureen.fields.body import PARAM_FIELDS, require_equal
from tureen.http.call import call_of
from tureen.http.chat_answer import arguments_of, check_complete, events_of, prepare_chat, run_to_end
from tureen.http.dialect import Docs, Entry, ErrorShape, client_name, read_body_with, streamed, unless_gone
from tureen.http.errors import error_answer
from tureen.log import get_logger
from tureen.requests.chat import Chat, prompt_of
from tureen.requests.drafts import Plan
from tureen.requests.explanations import Explained
from tureen.requests.generation import Output, OutputEvent
from tureen.requests.model_field import adapter_of
from tureen.requests.output_parser import join_parts
from tureen.requests.planning import Names
from tureen.requests.state import Context, ServerState
from tureen.requests.thinking_budget import ReasoningBudget
from tureen.requests.thinking_field import effort_kwargs, knows_effort, thinking_kwargs
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning, Tool

OVERLOADED_STATUS = 529
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
    504: "timeout_error",
}
PARAMETERS = {"max_tokens": "max_new_tokens", "stop_sequences": "stop", "seed": "sampling_seed"}
"""Anthropic's names of sampling parameters -> those of SamplingParams."""

THREAD_DETAILS = {"error_code": NO_THREADS, "unsupported": ["thread"]}
"""Details of the error by which Anthropic's clients know to send the whole conversation instead of a thread."""

EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know -> the highest that they do."""

ERROR_SHAPE = ErrorShape(
    "AnthropicError",
    {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "details": {"type": "object"},
                },
            },
            "request_id": {"type": "string"},
        },
    },
)
EXAMPLE = {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}
ABOUT = Docs(
    "Anthropic",
    "The next message.",
    example=EXAMPLE,
    headers={"anthropic-version": "Any version is accepted.", "x-api-key": "The API key, instead of `Authorization`."},
    error=ERROR_SHAPE,
)

log = get_logger("api")

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of this API."""

    async def create(request: Request) -> ASGIApp:
        def read(payload: dict[str, Any]) -> tuple[AnthropicBody, Chat]:
            body = parse(payload, AnthropicBody)
            return body, with_sampling(chat_of(body, state), body, payload)

        body, chat = await read_body_with(request, read)
        if body.metadata is not None and body.metadata.user_id is not None:
            log.debug("request %s is for user %s", call_of(request.scope).request_id, echo(body.metadata.user_id))
        plan = await prepare_chat(chat, request, state)
        if body.stream:
            request_id = call_of(request.scope).request_id
            events = _events(plan, body, state)
            return await streamed(request, events, lambda error: _event(error_object(error, request_id)))
        last = await run_to_end(plan, request, state, _budget(body))
        check_complete(last.output)
        return Response(_json.encode(_message(plan, body, last, state)), media_type="application/json")

    async def count_tokens(request: Request) -> Response:
        return await _count_tokens(request, state)

    counted = {name: EXAMPLE[name] for name in ("model", "messages")}
    counting = Entry(
        "/v1/messages/count_tokens",
        count_tokens,
        access="user",
        methods=["POST"],
        render_error=error_response,
        docs=ABOUT._replace(summary="Count the tokens of a prompt.", bodies=(AnthropicCountBody,), example=counted),
    )
    counting.needs_engine = False
    return [
        Entry(
            "/v1/messages",
            create,
            access="user",
            methods=["POST"],
            render_error=error_response,
            docs=ABOUT._replace(bodies=(AnthropicBody,), stream="text/event-stream"),
        ),
        counting,
    ]


async def _count_tokens(request: Request, state: ServerState) -> Response:
    def read(payload: dict[str, Any]) -> Chat:
        return chat_of(parse(payload, AnthropicCountBody), state)

    chat = await read_body_with(request, read)
    rendered = await unless_gone(request, prompt_of(chat, state, owner=client_name(request)))
    return Response(_json.encode({"input_tokens": len(rendered.prompt.token_ids)}), media_type="application/json")


def error_object(error: TureenError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's JSON form.

    Agents look for the words and the numbers of a prompt that is too long, and shorten their conversation then.
    """
    kind = ERROR_TYPES.get(_status(error), "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextExceeded):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.capacity} maximum. {message}"
    details = {"details": THREAD_DETAILS} if error.code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}


def error_response(error: TureenError) -> Response:
    """Returns an error as an answer with Anthropic's body and status (529 when overloaded)."""
    return error_answer(error, error_object(error, error.request_id), _status(error))


def _status(error: TureenError) -> int:
    return OVERLOADED_STATUS if error.status == 503 else error.status


def chat_of(body: AnthropicBody | AnthropicCountBody, state: ServerState) -> Chat:
    """Converts all of a body that its prompt is made of to a chat. Raises InvalidRequest, NotFound."""
    check_edits(body, state.context.capacity)
    conversation, client_tools = conversation_of(body.messages, body.system), tools_of(body)
    return Chat(
        messages=tuple(conversation.messages),
        pictures=tuple(conversation.pictures),
        tools=client_tools.tools,
        tool_places=client_tools.places,
        schema_field="tools[{}].input_schema",
        tool_choice=client_tools.choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        continue_final_message=conversation.continues_last,
        template_kwargs=_thinking(body, client_tools.tools, state.context),
        adapter=adapter_of(body.model, state),
    )


def with_sampling(chat: Chat, body: AnthropicBody, payload: dict[str, Any]) -> Chat:
    """Returns the chat with the body's sampling parameters. `payload`: the body as sent, which tells the fields that
    were set. Raises InvalidRequest."""
    sampling, renamed = _sampling(body, payload)
    # max_tokens is required, and stop_reason tells when the context ended the answer
    return msgspec.structs.replace(
        chat,
        sampling=sampling,
        names=Names("", renamed),
        clip_max_tokens=True,
        return_effective=body.return_effective,
        explain=body.explain,
    )


def _sampling(body: AnthropicBody, payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the sampling parameters that the body sets, by the names of SamplingParams, and the body's names for
    them.

    Raises InvalidRequest.
    """
    renamed: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    for name in payload:
        target = PARAMETERS.get(name, name)
        is_set = payload[name] is not None and not (payload[name] == "" and name in EMPTY_IS_UNSET)
        if target in PARAM_FIELDS and is_set and name not in TABLE.refused:
            sent = getattr(body, name)
            require_equal(name, sent, renamed.setdefault(target, name), sampling.setdefault(target, sent))
    forms = {
        "output_config.format.schema": None if body.output_config is None else body.output_config.format,
        "output_format.schema": body.output_format,
    }
    for field, form in forms.items():
        if form is None:
            continue
        if "json_schema" in sampling:
            raise InvalidRequest(f"{field} cannot go with {renamed['json_schema']}; send one", field=field)
        sampling["json_schema"], renamed["json_schema"] = form.schema, field
    return sampling, renamed


def _thinking(body: AnthropicBody | AnthropicCountBody, tools: Sequence[Tool], context: Context) -> dict[str, Any]:
    """Returns the variables of the chat template that say whether and how much the model thinks."""
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        variables |= thinking_kwargs(body.thinking.type == "enabled", "thinking", tools, context)
    effort, field = None if body.output_config is None else body.output_config.effort, "output_config.effort"
    if effort is not None and knows_effort(tools, context):
        variables |= effort_kwargs(EFFORTS.get(effort, effort), field, tools, context)
    elif effort is not None:
        ignored.tell(field, "this model's chat template has no reasoning levels")
    return variables


def _budget(body: AnthropicBody) -> ReasoningBudget | None:
    tokens = None if body.thinking is None else body.thinking.budget_tokens
    return None if tokens is None else ReasoningBudget(tokens, "thinking.budget_tokens")


def _message(plan: Plan, body: AnthropicBody, last: OutputEvent, state: ServerState) -> dict[str, Any]:
    blocks = ContentBlocks(body)
    for part in last.parts:
        blocks.feed(part)
    blocks.close()
    usage = _usage(last.output, plan, last.parts, state)
    explained = Explained(state.context).new(last.output)
    return _head(body) | {"content": blocks.content} | _stop(last, plan, body) | {"usage": usage} | explained


def _head(body: AnthropicBody) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": body.model}


def _stop(last: OutputEvent, plan: Plan, body: AnthropicBody) -> dict[str, Any]:
    output = last.output
    matched = output.finish.matched if output.finish is not None else None
    sequence = matched if isinstance(matched, str) else None
    reason = last.reader.finish_reason(output)
    if reason == "length":
        is_clipped = plan.requests[0].max_new_tokens < body.max_tokens
        named = "model_context_window_exceeded" if is_clipped else "max_tokens"
    elif reason == "tool_calls":
        named, sequence = "tool_use", None
    else:
        named = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": named, "stop_sequence": sequence, **output.ending_notes}


def _usage(output: Output, plan: Plan, parts: Sequence[Part], state: ServerState) -> dict[str, Any]:
    """Returns Anthropic's `usage`: `input_tokens` without those read from the prefix cache, which are counted apart;
    writing to the cache costs nothing."""
    usage = output.usage
    num_thinking = plan.reading.num_reasoning_tokens(output, join_parts(parts), state.context.tokenizer)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": len(output.token_ids),
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


class ContentBlocks:
    """Builds the content blocks of an answer from its parts, and the streaming events that carry them."""

    def __init__(self, body: AnthropicBody) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._is_open = False
        self._arguments = ""  # arguments so far of the open tool_use block

    def feed(self, part: Part) -> list[dict[str, Any]]:
        """Adds a part and returns the events for it."""
        match part:
            case Reasoning(text):
                events = self._open("thinking", {"thinking": "", "signature": ""})
                return events + (self._grow("thinking", text) if self._shows_thinking else [])
            case Content(text):
                return self._open("text", {"text": ""}) + self._grow("text", text)
            case CallStart(_, name):
                call = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
                return self._open("tool_use", call, is_new=True)
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta("input_json_delta", "partial_json", text)]

    def _is_in(self, kind: str) -> bool:
        return self._is_open and bool(self.content[-1]["type"] == kind)

    def _open(self, kind: str, block: dict[str, Any], *, is_new: bool = False) -> list[dict[str, Any]]:
        if self._is_in(kind) and not is_new:
            return []
        events = self.close()
        self.content.append({"type": kind, **block})
        self._is_open = True
        index = len(self.content) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": {"type": kind, **block}}]

    def _grow(self, kind: str, text: str) -> list[dict[str, Any]]:
        self.content[-1][kind] += text
        return [self._delta(f"{kind}_delta", kind, text)]

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def close(self) -> list[dict[str, Any]]:
        """Completes the open block and returns the events for that."""
        if not self._is_open:
            return []
        if self._is_in("tool_use"):
            self.content[-1]["input"], self._arguments = arguments_of(self._arguments), ""
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]


def _event(payload: dict[str, Any]) -> bytes:
    return f"event: {payload['type']}\ndata: ".encode() + _json.encode(payload) + b"\n\n"


async def _events(plan: Plan, body: AnthropicBody, state: ServerState) -> AsyncGenerator[bytes, None]:
    blocks, seen, explained = ContentBlocks(body), list[Part](), Explained(state.context)
    is_first = True
    async with contextlib.aclosing(events_of(plan, state, budget=_budget(body))) as events:
        async for event in events:
            output = event.output
            check_complete(output)
            if is_first:
                usage = _usage(output, plan, (), state) | {"output_tokens": 0}
                start = _head(body) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _event({"type": "message_start", "message": start})
                is_first = False
            seen += event.parts
            block_events = [block_event for part in event.parts for block_event in blocks.feed(part)]
            for block_event in block_events[:-1]:
                yield _event(block_event)
            for block_event in block_events[-1:]:
                yield _event(block_event | explained.new(output))
            if output.finish is not None:
                for block_event in blocks.close():
                    yield _event(block_event)
                usage = _usage(output, plan, seen, state)
                delta = {"type": "message_delta", "delta": _stop(event, plan, body), "usage": usage}
                yield _event(delta | explained.new(output))
                yield _event({"type": "message_stop"})
