"""Serves OpenAI's `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses, and /responses-streaming.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tureen.dialects.openai import answer as openai_answer
from tureen.dialects.openai.responses_body import ResponsesBody, ResponsesTool, chat_of, parse
from tureen.errors import TureenError
from tureen.http.chat_answer import events_of, prepare_chat, run_to_end
from tureen.http.dialect import Docs, Entry, read_body_with, streamed
from tureen.http.errors import error_object
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output
from tureen.requests.reading import join_parts
from tureen.requests.state import Context, ServerState
from tureen.requests.tool_fields import call_id
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 16}
CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of an item that is a call -> (the field that grows, the name of its events)."""
COMPLETED, INCOMPLETE = "completed", "incomplete"

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
    """Says in the metadata, whose values are strings, what became of the constraint."""
    notes = output.constraint_notes
    if not notes:
        return {}
    unenforced = {"unenforced": ", ".join(notes["unenforced"])} if "unenforced" in notes else {}
    flags = {name: "true" if notes[name] else "false" for name in ("valid", "closed_early") if name in notes}
    return {"metadata": head["metadata"] | unenforced | flags}


def _usage(output: Output, num_reasoning: int) -> dict[str, Any]:
    num_prompt, num_output = output.usage.prompt_tokens, len(output.token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": output.usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_output,
    }


class OutputItems:
    """Builds the output items of a response from its parts, and the streaming events that carry them."""

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._custom_tools = custom_tools
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def feed(self, part: Part) -> list[dict[str, Any]]:
        """Adds a part and returns the events for it."""
        match part:
            case Reasoning(text):
                return self._open("reasoning") + self._grow("reasoning_text", text)
            case Content(text):
                return self._open("message") + self._grow("output_text", text)
            case CallStart(_, name):
                return self._open("custom_tool_call" if name in self._custom_tools else "function_call", name)
            case CallArguments(_, text):
                field, event = CALLS[self.output[-1]["type"]]
                self.output[-1][field] += text
                return [self._event(f"response.{event}.delta", delta=text)]

    def close(self, status: str) -> list[dict[str, Any]]:
        """Completes the last item with `status` and returns the events for it; a response without output gets an empty
        message."""
        events = []
        if not self.output:
            events = self._open("message")
        return events + self._end(status)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and bool(self.output[-1]["type"] == kind)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Returns an event about the open item."""
        index = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": index, **fields}

    def _open(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        if self._is_in(kind) and kind not in CALLS:
            return []
        events = self._end(COMPLETED)
        item, part = _new_item(kind, name)
        self.output.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}
        events.append(added)
        if part is not None:
            item["content"].append(part)
            events.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        return events

    def _grow(self, kind: str, text: str) -> list[dict[str, Any]]:
        self.output[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return [self._event(f"response.{kind}.delta", content_index=0, delta=text, **more)]

    def _end(self, status: str) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        events = []
        if item["type"] in CALLS:
            field, event = CALLS[item["type"]]
            events.append(self._event(f"response.{event}.done", **{field: item[field]}))
        else:
            [part] = item["content"]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            done = f"response.{part['type']}.done"
            events.append(self._event(done, content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        done_item = {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": _copy(item)}
        return [*events, done_item]


def _new_item(kind: str, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns an item without content, and the content part to put into it, None for a function call."""
    if kind in CALLS:
        call = {"id": _id("fc" if kind == "function_call" else "ctc"), "call_id": call_id(), "name": name}
        return {"type": kind, **call, CALLS[kind][0]: "", "status": "in_progress"}, None
    item: dict[str, Any] = {"type": kind, "id": _id("rs"), "summary": [], "content": [], "status": "in_progress"}
    if kind == "reasoning":
        return item, {"type": "reasoning_text", "text": ""}
    item = {"type": kind, "id": _id("msg"), "role": "assistant", "content": [], "status": "in_progress"}
    return item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Copies an item for an event: it goes on changing."""
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class EventWriter:
    """Encodes the events of one stream, numbered in sequence."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self._number = 0

    def write(self, event: dict[str, Any]) -> bytes:
        """Returns a server-sent event with the next sequence number."""
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + _json.encode(numbered) + b"\n\n"

    def response(self, kind: str, **fields: Any) -> bytes:
        """Returns an event that carries the response as a whole."""
        return self.write({"type": f"response.{kind}", "response": self.head | fields})

    def failed(self, error: TureenError) -> bytes:
        """Returns the event `response.failed`."""
        details = error_object(error)["error"]
        return self.response("failed", status="failed", error=details | {"code": "server_error"})


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
