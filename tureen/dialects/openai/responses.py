"""Serves OpenAI's `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses, and /responses-streaming.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.openai import answer as openai_answer
from tureen.dialects.openai.responses_body import ResponsesBody, chat_of, parse
from tureen.dialects.openai.responses_output import COMPLETED, INCOMPLETE, EventWriter, OutputItems
from tureen.dialects.openai.responses_tools import ResponsesTool
from tureen.http.chat_answer import events_of, prepare_chat, run_to_end
from tureen.http.dialect import Docs, Entry, read_body_with, streamed
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output
from tureen.requests.reading import join_parts
from tureen.requests.state import Context, ServerState
from tureen.text.messages import Part

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 16}

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    """Returns the route of this API."""

    async def responses(request: Request) -> ASGIApp:
        def read(payload: dict[str, Any]) -> tuple[ResponsesBody, str, Chat]:
            body = parse(payload)
            name = openai_answer.name_of(body, "resp")
            return body, name, chat_of(body, payload, name, state)

        body, name, chat = await read_body_with(request, read)
        plan = await prepare_chat(chat, request, state)
        head = _head(name, body, plan, state.context)
        if body.stream:
            writer = EventWriter(head)
            return await streamed(request, _events(plan, writer, state), writer.failed)
        last = await run_to_end(plan, request, state)
        items = OutputItems(plan.reading.custom_tools)
        for part in last.parts:
            items.feed(part)
        items.close(_status(last.output))
        ending = _end(items, plan, last.output, last.parts, state)
        return Response(_json.encode(head | ending | _told(head, last.output)), media_type="application/json")

    docs = Docs("OpenAI", "Answer a conversation of items.", (ResponsesBody,), EXAMPLE, stream="text/event-stream")
    return [Entry("/v1/responses", responses, access="user", methods=["POST"], docs=docs)]


def _head(name: str, body: ResponsesBody, plan: Plan, context: Context) -> dict[str, Any]:
    """Returns a response before any of its output is there."""
    params = plan.requests[0].params
    text_format = body.text.format if body.text is not None and body.text.format is not None else None
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model or context.info.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if text_format is None else _sent(text_format)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_sent_tool(tool) for tool in body.tools or ()],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    } | openai_answer.metadata(body, context, **plan.reading.notes)


def _sent(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


def _sent_tool(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type == "function":
        return {"parameters": None, "strict": None} | _sent(tool)
    return _sent(tool) | {"format": {"type": "text"} if tool.format is None else _sent(tool.format)}


def _status(output: Output) -> str:
    return COMPLETED if output.finish is not None and output.finish.type == "stop" else INCOMPLETE


def _cut_by(output: Output) -> str | None:
    """Returns why an output is incomplete: OpenAI's reason, or ours for an aborted one, such as a deadline."""
    if output.finish is not None and output.finish.type == "abort":
        return output.finish.reason
    return "max_output_tokens"


def _end(items: OutputItems, plan: Plan, output: Output, parts: Sequence[Part], state: ServerState) -> dict[str, Any]:
    """Returns the fields of a response that change when it has ended."""
    status = _status(output)
    num_reasoning = plan.reading.num_reasoning_tokens(output, join_parts(parts), state.context.tokenizer)
    return {
        "status": status,
        "completed_at": int(time.time()) if status == COMPLETED else None,
        "incomplete_details": {"reason": _cut_by(output)} if status == INCOMPLETE else None,
        "output": items.output,
        "usage": _usage(output, num_reasoning),
    }


def _told(head: dict[str, Any], output: Output) -> dict[str, Any]:
    """Says in the metadata, whose values are strings, what of the constraint was not enforced."""
    told = output.conformity.metadata
    if not told:
        return {}
    valid = {"valid": "true" if told["valid"] else "false"} if "valid" in told else {}
    return {"metadata": head["metadata"] | {"unenforced": ", ".join(told["unenforced"]), **valid}}


def _usage(output: Output, num_reasoning: int) -> dict[str, Any]:
    num_prompt, num_output = output.usage.prompt_tokens, len(output.token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": output.usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_output,
    }


async def _events(plan: Plan, writer: EventWriter, state: ServerState) -> AsyncGenerator[bytes, None]:
    items, seen = OutputItems(plan.reading.custom_tools), list[Part]()
    is_first = True
    async with contextlib.aclosing(events_of(plan, state)) as events:
        async for event in events:
            if is_first:
                yield writer.response("created")
                yield writer.response("in_progress")
                is_first = False
            seen += event.parts
            for part in event.parts:
                for item_event in items.feed(part):
                    yield writer.write(item_event)
            if event.output.finish is not None:
                for item_event in items.close(_status(event.output)):
                    yield writer.write(item_event)
                fields = _end(items, plan, event.output, seen, state) | _told(writer.head, event.output)
                yield writer.response(_status(event.output), **fields)
