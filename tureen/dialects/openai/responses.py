"""OpenAI's `/v1/responses`. Reference: OpenAI's API reference, "Responses" and "Streaming events"."""

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
from tureen.http.chat_answer import events_of, planned, whole
from tureen.http.dialect import Docs, Entry, read_with, streamed
from tureen.http.errors import error_object
from tureen.requests.chat import Chat
from tureen.requests.drafts import Plan
from tureen.requests.generation import Output
from tureen.requests.reading import joined
from tureen.requests.state import Context, ServerState
from tureen.requests.tool_fields import call_id
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning

EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 16}
CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""The items that are calls: the field that grows, and what its events are called."""
COMPLETED, INCOMPLETE = "completed", "incomplete"

_json = msgspec.json.Encoder()


def routes(state: ServerState) -> list[Entry]:
    async def responses(request: Request) -> ASGIApp:
        def read(given: dict[str, Any]) -> tuple[ResponsesBody, str, Chat]:
            body = parse(given)
            name = openai_answer.name_of(body, "resp")
            return body, name, chat_of(body, given, name, state)

        body, name, chat = await read_with(request, read)
        plan = await planned(chat, request, state)
        head = _head(name, body, plan, state.context)
        if body.stream:
            writer = EventWriter(head)
            return await streamed(request, _events(plan, writer, state), writer.failed)
        last = await whole(plan, request, state)
        items = Items(plan.reading.custom_tools)
        for part in last.parts:
            items.feed(part)
        items.close(_status(last.output))
        ending = _end(items, plan, last.output, last.parts, state)
        return Response(_json.encode(head | ending | _told(head, last.output)), media_type="application/json")

    docs = Docs("OpenAI", "Answer a conversation of items.", (ResponsesBody,), EXAMPLE, stream="text/event-stream")
    return [Entry("/v1/responses", responses, access="user", methods=["POST"], docs=docs)]


def _head(name: str, body: ResponsesBody, plan: Plan, context: Context) -> dict[str, Any]:
    """A response before there is anything of it."""
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
    """Why an output is not complete: OpenAI's reason, or what ended it from outside, such as a deadline."""
    if output.finish is not None and output.finish.type == "abort":
        return output.finish.reason
    return "max_output_tokens"


def _end(items: Items, plan: Plan, output: Output, parts: Sequence[Part], state: ServerState) -> dict[str, Any]:
    """What is known of a response when it has ended."""
    status = _status(output)
    num_reasoning = plan.reading.num_reasoning_tokens(output, joined(parts), state.context.tokenizer)
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


class Items:
    """The output items that an answer's parts make, and the events that tell of them."""

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._custom_tools = custom_tools
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def feed(self, part: Part) -> list[dict[str, Any]]:
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
        """The answer has ended; `status`: of its last item."""
        events = []
        if not self.output:
            events = self._open("message")
        return events + self._end(status)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and bool(self.output[-1]["type"] == kind)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One that names the open item."""
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
    """An item without content, and the part that its content will be."""
    if kind in CALLS:
        call = {"id": _id("fc" if kind == "function_call" else "ctc"), "call_id": call_id(), "name": name}
        return {"type": kind, **call, CALLS[kind][0]: "", "status": "in_progress"}, None
    item: dict[str, Any] = {"type": kind, "id": _id("rs"), "summary": [], "content": [], "status": "in_progress"}
    if kind == "reasoning":
        return item, {"type": "reasoning_text", "text": ""}
    item = {"type": kind, "id": _id("msg"), "role": "assistant", "content": [], "status": "in_progress"}
    return item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now."""
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self._number = 0

    def write(self, event: dict[str, Any]) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + _json.encode(numbered) + b"\n\n"

    def response(self, kind: str, **fields: Any) -> bytes:
        """An event that tells of the whole response."""
        return self.write({"type": f"response.{kind}", "response": self.head | fields})

    def failed(self, error: TureenError) -> bytes:
        told = error_object(error)["error"]
        return self.response("failed", status="failed", error=told | {"code": "server_error"})


async def _events(plan: Plan, writer: EventWriter, state: ServerState) -> AsyncGenerator[bytes, None]:
    items, seen = Items(plan.reading.custom_tools), list[Part]()
    is_first = True
    async with contextlib.aclosing(events_of(plan, state)) as events:
        async for event in events:
            if is_first:
                yield writer.response("created")
                yield writer.response("in_progress")
                is_first = False
            seen += event.parts
            for part in event.parts:
                for told in items.feed(part):
                    yield writer.write(told)
            if event.output.finish is not None:
                for told in items.close(_status(event.output)):
                    yield writer.write(told)
                fields = _end(items, plan, event.output, seen, state) | _told(writer.head, event.output)
                yield writer.response(_status(event.output), **fields)
