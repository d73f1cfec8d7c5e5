"""Builds the output items of a response of OpenAI's `/v1/responses`, and the events of its stream.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tureen.dialects.openai.responses_input import sealed
from tureen.dialects.openai.responses_logprobs import TextLogprobs, without_bytes
from tureen.errors import TureenError
from tureen.fields.tools import call_id
from tureen.http.errors import error_object
from tureen.requests.generation import Output
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning

CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of an item that is a call -> (the field that grows, the name of its events)."""
COMPLETED, INCOMPLETE, CANCELLED = "completed", "incomplete", "cancelled"

_json = msgspec.json.Encoder()


class OutputItems:
    """Builds the output items of a response from its parts, and the streaming events that carry them."""

    def __init__(
        self,
        custom_tools: frozenset[str],
        namespaces: Mapping[str, tuple[str, str]],
        logprobs: TextLogprobs | None = None,
        *,
        encrypts: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """`namespaces`: name that the model calls -> namespace and own name of a tool. `logprobs` follows the output,
        None = no log-probabilities are asked for; `encrypts`: reasoning comes with `encrypted_content` too;
        `shows_reasoning`: else it is left out, but for its `encrypted_content`."""
        self._namespaces = namespaces
        self._custom_tools = custom_tools
        self._logprobs = logprobs
        self._encrypts = encrypts
        self._shows_reasoning = shows_reasoning
        self._unshown = ""  # reasoning of the open item, which has no content
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def read(self, output: Output, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Adds the parts that are new in an output and returns the events for them."""
        if self._logprobs is not None:
            self._logprobs.catch_up(output)
        return [event for part in parts for event in self._feed(part)]

    def _feed(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case Reasoning(text):
                if self._logprobs is not None:
                    self._logprobs.skip(text)
                if self._shows_reasoning:
                    return self._open("reasoning") + self._grow("reasoning_text", text)
                self._unshown += text
                return self._open("reasoning") if self._encrypts else []
            case Content(text):
                entries = [] if self._logprobs is None else self._logprobs.take(text)
                return self._open("message") + self._grow("output_text", text, entries)
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
        if name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[name]
        self.output.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}
        events.append(added)
        if part is not None and (kind != "reasoning" or self._shows_reasoning):
            item["content"].append(part)
            events.append(self._event("response.content_part.added", content_index=0, part=_copy_part(part)))
        return events

    def _grow(self, kind: str, text: str, entries: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        part = self.output[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "output_text":
            part["logprobs"] += entries
            more = {"logprobs": without_bytes(entries)}
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
        elif not item["content"]:
            item["encrypted_content"], self._unshown = sealed(self._unshown), ""
        else:
            [part] = item["content"]
            more: dict[str, Any] = {}
            if part["type"] == "output_text":
                more = {"logprobs": without_bytes(part["logprobs"])}
            elif self._encrypts:
                item["encrypted_content"] = sealed(part["text"])
            done = f"response.{part['type']}.done"
            events.append(self._event(done, content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=_copy_part(part)))
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
    return item | {"content": [_copy_part(part) for part in item["content"]]} if "content" in item else dict(item)


def _copy_part(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"logprobs": list(part["logprobs"])} if "logprobs" in part else dict(part)


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

    def failed(self, error: TureenError) -> bytes:
        """Returns the event `response.failed`."""
        return self.write(whole_event("failed", failed_response(self.head, error)))


def whole_event(kind: str, response: dict[str, Any]) -> dict[str, Any]:
    """Returns an event that carries the response as a whole."""
    return {"type": f"response.{kind}", "response": response}


def failed_response(head: dict[str, Any], error: TureenError) -> dict[str, Any]:
    """Returns a response that an error ended."""
    return head | {"status": "failed", "error": error_object(error)["error"] | {"code": "server_error"}}
