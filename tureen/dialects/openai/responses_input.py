"""Declares the items of `input` of OpenAI's `/v1/responses` and converts them to a conversation.

Source: https://platform.openai.com/docs/api-reference/responses/create (input).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.dialects.openai.body import tell_detail
from tureen.errors import InvalidRequest, echo
from tureen.requests.tool_fields import read_arguments
from tureen.text.messages import MAX_PARTS, Message

KINDS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip
PARTS = ("input_text", "input_image", "output_text", "refusal")

T = TypeVar("T")

PartList = Annotated[list[T], Meta(max_length=MAX_PARTS)]
Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesInputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_text"):
    """Text of the user or the system."""

    text: str


class ResponsesInputImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_image"):
    """`detail`: pictures are always shown as finely as the model takes them."""

    image_url: Annotated[str, Meta(min_length=1)]
    detail: str | None = None


class ResponsesOutputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="output_text"):
    """Text of an answer that the client sends back."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class ResponsesRefusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refusal"):
    """A refusal in an answer of another model that the client sends back."""

    refusal: str


Shown = ResponsesInputText | ResponsesInputImage


class ResponsesMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="message"):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | PartList[ResponsesInputText | ResponsesInputImage | ResponsesOutputText | ResponsesRefusal]
    id: str | None = None
    status: Status | None = None


class ResponsesFunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function_call"):
    """A function call of an answer that the client sends back."""

    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="A JSON object, as text.")]
    id: str | None = None
    status: Status | None = None


class ResponsesCallOutput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function_call_output"
):
    """The result of a function call."""

    call_id: str
    output: str | PartList[Shown]
    id: str | None = None
    status: Status | None = None


class ResponsesCustomCall(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom_tool_call"
):
    """A custom tool's call of an answer that the client sends back."""

    call_id: str
    name: str
    input: str
    id: str | None = None
    status: Status | None = None


class ResponsesCustomOutput(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom_tool_call_output"
):
    """The result of a custom tool's call."""

    call_id: str
    output: str | PartList[Shown]
    id: str | None = None
    status: Status | None = None


class ResponsesThought(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reasoning_text"):
    """A piece of reasoning."""

    text: str


class ResponsesReasoningItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reasoning"):
    """Reasoning of an answer that the client sends back."""

    id: str | None = None
    summary: Annotated[list[Any], Meta(max_length=0)] | None = None
    content: PartList[ResponsesThought] | None = None
    status: Status | None = None


ResponsesItem = (
    ResponsesMessage
    | ResponsesFunctionCall
    | ResponsesCallOutput
    | ResponsesCustomCall
    | ResponsesCustomOutput
    | ResponsesReasoningItem
)


def read_items(sent_items: Sequence[Any]) -> list[Any]:
    """Returns the items without nulls; a message without a type gets it. Raises InvalidRequest for unknown types."""
    items = []
    for index, item in enumerate(sent_items):
        if isinstance(item, dict):
            item = {name: value for name, value in item.items() if value is not None}
            if "type" not in item and "role" in item:
                item["type"] = "message"
            _check_type(item, KINDS, f"input[{index}]")
            for field in ("content", "output"):
                if isinstance(item.get(field), list) and len(item[field]) <= MAX_PARTS:
                    item[field] = _parts(item, field, f"input[{index}].{field}")
        items.append(item)
    return items


def _parts(item: Mapping[str, Any], field: str, where: str) -> list[Any]:
    parts = []
    for index, part in enumerate(item[field]):
        if isinstance(part, dict):
            part = {name: value for name, value in part.items() if value is not None}
            _check_type(part, ("reasoning_text",) if item["type"] == "reasoning" else PARTS, f"{where}[{index}]")
        parts.append(part)
    return parts


def _check_type(item: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if item.get("type") not in known:
        raise InvalidRequest(
            f"{where}.type must be {', '.join(known)}; got {echo(item.get('type'))}", field=f"{where}.type"
        )


class ResponsesConversation:
    """Builds messages as chat templates take them, item by item."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: list[str] = []
        self._names: dict[str, str] = {}  # call_id of each call so far -> the function's name
        self._texts: list[str] = []  # texts of the last message, which may get more
        self._is_turn = False  # the last message is the assistant's, and more of its turn may follow

    def add(self, item: ResponsesItem, where: str) -> None:
        """Adds an item; `where` names it in errors. Raises InvalidRequest."""
        if isinstance(item, ResponsesCallOutput | ResponsesCustomOutput):
            self._add_output(item, where)
        elif isinstance(item, ResponsesFunctionCall | ResponsesCustomCall):
            self._names[item.call_id] = item.name
            function = {"name": item.name, "arguments": _arguments(item, where)}
            calls = self._turn().setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ResponsesReasoningItem):
            text = "".join(part.text for part in item.content or ())
            if text:
                self._turn("content", "tool_calls")["reasoning_content"] = text
        elif item.role == "assistant":
            text = self._text(item, where)
            self._turn("tool_calls")
            self._texts += [text] if text else []
        else:
            self.add_message("user" if item.role == "user" else "system", self._shown(item, where))

    def add_message(self, role: str, content: str | list[dict[str, Any]]) -> None:
        """Adds a message. Consecutive system messages become one, because many templates know only one."""
        is_more = role == "system" and bool(self.messages) and self.messages[-1]["role"] == role
        if not is_more:
            self._begin({"role": role, "content": content})
        if role == "system" and isinstance(content, str):
            self._texts.append(content)

    def _begin(self, message: Message) -> None:
        self.close()
        self._is_turn = message["role"] == "assistant"
        self.messages.append(message)

    def close(self) -> None:
        """Completes the last message."""
        if self._texts:
            gap = "\n\n" if self.messages[-1]["role"] == "system" else ""
            self.messages[-1]["content"] = gap.join(self._texts)
        self._texts = []

    def _turn(self, *unless: str) -> Message:
        """Returns the assistant's message to add to; a new one when the last one already has a field of `unless`."""
        if not self._is_turn or any(
            self._texts if name == "content" else self.messages[-1].get(name) for name in unless
        ):
            self._begin({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _add_output(self, item: ResponsesCallOutput | ResponsesCustomOutput, where: str) -> None:
        name = self._names.get(item.call_id)
        if name is None:
            raise InvalidRequest(
                f"{where}.call_id {echo(item.call_id)} is that of no call before it", field=f"{where}.call_id"
            )
        content = item.output if isinstance(item.output, str) else self._joined(item.output, f"{where}.output")
        self._begin({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": content})

    def _shown(self, item: ResponsesMessage, where: str) -> str | list[dict[str, Any]]:
        if isinstance(item.content, str):
            return item.content
        parts: list[Shown] = []
        for index, part in enumerate(item.content):
            is_picture = isinstance(part, ResponsesInputImage)
            if not isinstance(part, ResponsesInputText | ResponsesInputImage) or (is_picture and item.role != "user"):
                raise _misplaced(part, item.role, f"{where}.content[{index}]")
            parts.append(part)
        return self._joined(parts, f"{where}.content")

    def _joined(self, parts: Sequence[Shown], where: str) -> str | list[dict[str, Any]]:
        """Converts parts, which stand at `where`; returns a string when all are text."""
        if all(isinstance(part, ResponsesInputText) for part in parts):
            return "".join(part.text for part in parts if isinstance(part, ResponsesInputText))
        template_parts: list[dict[str, Any]] = []
        for index, part in enumerate(parts):
            if isinstance(part, ResponsesInputText):
                template_parts.append({"type": "text", "text": part.text})
            else:
                self.pictures.append(part.image_url)
                tell_detail(part.detail, f"{where}[{index}].detail")
                template_parts.append({"type": "image"})
        return template_parts

    def _text(self, item: ResponsesMessage, where: str) -> str:
        if isinstance(item.content, str):
            return item.content
        texts = []
        for index, part in enumerate(item.content):
            if isinstance(part, ResponsesInputImage):
                raise _misplaced(part, item.role, f"{where}.content[{index}]")
            texts.append(part.refusal if isinstance(part, ResponsesRefusal) else part.text)
        return "".join(texts)


def conversation_of(items: str | Sequence[ResponsesItem], instructions: str | None) -> ResponsesConversation:
    """Converts `input` and `instructions` to a conversation. Raises InvalidRequest."""
    conversation = ResponsesConversation()
    if instructions:
        conversation.add_message("system", instructions)
    if isinstance(items, str):
        conversation.add_message("user", items)
    else:
        for index, item in enumerate(items):
            conversation.add(item, f"input[{index}]")
    conversation.close()
    if not conversation.messages:
        raise InvalidRequest("input is empty; send what the model is to answer", field="input", code="empty_prompt")
    return conversation


def _arguments(item: ResponsesFunctionCall | ResponsesCustomCall, where: str) -> dict[str, Any]:
    if isinstance(item, ResponsesCustomCall):
        return {"input": item.input}
    return read_arguments(item.arguments, f"{where}.arguments")


def _misplaced(part: msgspec.Struct, role: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: a message of role {role} has no {part.__struct_config__.tag} parts", field=f"{where}.type"
    )
