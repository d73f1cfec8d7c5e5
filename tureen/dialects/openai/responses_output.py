"""Builds the output items of a response of OpenAI's `/v1/responses`, and the events of its stream.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from tureen.errors import TureenError
from tureen.http.errors import error_object
from tureen.requests.tool_fields import call_id
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning

CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of an item that is a call -> (the field that grows, the name of its events)."""
COMPLETED, INCOMPLETE = "completed", "incomplete"

_json = msgspec.json.Encoder()


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
