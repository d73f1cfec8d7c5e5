"""Serves OpenAI's `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses, and /responses-streaming.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.openai import answer as openai_answer
from tureen.dialects.openai import responses_kept, token_fields
from tureen.dialects.openai.responses_background import ENDS, BackgroundResponse
from tureen.dialects.openai.responses_body import ResponsesBody, chat_of, parse
from tureen.dialects.openai.responses_keeping import Keeping, conversation_id, keeping_of, with_references
from tureen.dialects.openai.responses_making import Making
from tureen.dialects.openai.responses_output import EventWriter, failed_response
from tureen.dialects.openai.responses_tools import OWN, ResponsesTool
from tureen.dialects.openai.responses_truncation import prepare_truncated
from tureen.errors import TureenError
from tureen.http.chat_answer import prepare_chat
from tureen.http.dialect import BYTES_PER_CHAR, Docs, Entry, client_name, read_body_with, streamed, unless_gone
from tureen.http.errors import error_object
from tureen.http.sse import event
from tureen.requests.chat import Chat, prompt_of
from tureen.requests.chat_prompt import MESSAGE_CHARS
from tureen.requests.drafts import Plan
from tureen.requests.offload import offload
from tureen.requests.state import Context, ServerState

EXAMPLE = {"input": "What is the capital of Japan?", "max_output_tokens": 16}

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes of this API."""
    running: responses_kept.Running = state.common.background

    async def responses(request: Request) -> ASGIApp:
        making, keeping = await _prepare(request, state)
        if making.body.background and keeping is not None:
            return await _begin(request, making, keeping, running)
        if making.body.stream:
            writer = EventWriter(making.head)
            return await streamed(request, _stream(making, keeping, writer), writer.failed)
        response = await making.whole(request)
        if keeping is not None:
            await keeping.add(response)
        return _answer(response)

    async def input_tokens(request: Request) -> Response:
        chat = (await _read(request, state)).chat
        rendered = await unless_gone(request, prompt_of(chat, state, owner=client_name(request)))
        num_tokens = len(rendered.prompt.token_ids)
        return _answer({"object": "response.input_tokens", "input_tokens": num_tokens})

    docs = Docs("OpenAI", "Answer a conversation of items.", (ResponsesBody,), EXAMPLE, stream="text/event-stream")
    counting = Docs("OpenAI", "Count the tokens of a response's prompt.", (ResponsesBody,), EXAMPLE)
    return [
        Entry("/v1/responses", responses, access="user", methods=["POST"], docs=docs),
        Entry("/v1/responses/input_tokens", input_tokens, access="user", methods=["POST"], docs=counting),
        *responses_kept.routes(state, running),
    ]


class _ReadBody(NamedTuple):
    """A body, and the chat that it asks for."""

    body: ResponsesBody
    chat: Chat
    sources: Sequence[Sequence[str]]  # for each message the items that it was made of
    name: str  # the id of the answer
    keeping: Keeping | None


async def _read(request: Request, state: ServerState) -> _ReadBody:
    """Reads a body and the conversation that it continues."""

    def read(payload: dict[str, Any]) -> tuple[dict[str, Any], ResponsesBody, str]:
        body = parse(payload)
        return payload, body, openai_answer.name_of(body, "resp_")

    payload, body, name = await read_body_with(request, read)
    body, num_named = await with_references(body, request, state)
    num_bytes = len(await request.body()) + num_named
    keeping = await keeping_of(body, num_bytes, request, state)
    before = () if keeping is None else keeping.continued.items
    size = num_bytes // BYTES_PER_CHAR + MESSAGE_CHARS * len(before)
    chat, sources = await offload.run(size, lambda: chat_of(body, payload, name, state, before))
    return _ReadBody(body, chat, sources, name, keeping)


async def _prepare(request: Request, state: ServerState) -> tuple[Making, Keeping | None]:
    """Reads a body and returns the response that it asks for, and how that is kept."""
    body, chat, sources, name, keeping = await _read(request, state)
    notes = {}
    if body.truncation == "auto":
        plan, num_dropped = await prepare_truncated(chat, sources, request, state)
        notes = {"truncated_items": str(num_dropped)} if num_dropped else {}
    else:
        plan = await prepare_chat(chat, request, state)
    token_fields.check_plan(body, plan, "top_logprobs", body.top_logprobs)
    return Making(_head(name, body, plan, state.context, **notes), plan, body, state), keeping


async def _begin(request: Request, making: Making, keeping: Keeping, running: responses_kept.Running) -> ASGIApp:
    """Begins a response in the background. Returns it as it is, or its stream."""
    await keeping.add(making.head)
    response = BackgroundResponse(making, keeping, EventWriter(making.head))
    try:
        response.start(request, running)
    except TureenError:
        await keeping.drop(making.head)
        raise
    if not making.body.stream:
        return _answer(making.head)
    return await streamed(request, response.follow(0), lambda error: event(_json.encode(error_object(error))))


async def _stream(making: Making, keeping: Keeping | None, writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """Yields the events of a response; the last one when the response is kept. One that an error ends, or whose client
    leaves, is kept as far as it came."""
    has_begun = False
    async with contextlib.aclosing(making.events(None if keeping is None else keeping.add_later)) as events:
        try:
            async for each in events:
                if keeping is not None and each["type"] in ENDS:
                    await keeping.add(each["response"])
                has_begun = True
                yield writer.write(each)
        except TureenError as error:
            if keeping is not None and has_begun:
                keeping.add_later(failed_response(writer.head, error))
            raise


def _answer(response: dict[str, Any]) -> Response:
    return Response(_json.encode(response), media_type="application/json")


def _head(name: str, body: ResponsesBody, plan: Plan, context: Context, **notes: str) -> dict[str, Any]:
    """Returns a response before any of its output is there."""
    params = plan.requests[0].params
    text_format = body.text.format if body.text is not None and body.text.format is not None else None
    conversation = conversation_id(body)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": body.background,
        "conversation": None if conversation is None else {"id": conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model or context.info.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if text_format is None else _sent(text_format)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_sent_tool(tool) for tool in body.tools or () if tool.type in OWN],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    } | openai_answer.metadata(body, context, **plan.reading.notes, **notes)


def _sent(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


def _sent_tool(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type == "namespace":
        return {"description": ""} | _sent(tool) | {"tools": [_sent_tool(inner) for inner in tool.tools or ()]}
    if tool.type == "function":
        return {"parameters": None, "strict": None} | _sent(tool)
    return _sent(tool) | {"format": {"type": "text"} if tool.format is None else _sent(tool.format)}
