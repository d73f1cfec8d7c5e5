"""Declares the items of `input` of OpenAI's `/v1/responses` and converts them to a conversation.

Source: https://platform.openai.com/docs/api-reference/responses/create (input).
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.dialects.openai.body import refuse_audio, tell_detail
from tureen.dialects.openai.responses_foreign import (
    COMPACTION,
    FOREIGN,
    ForeignCall,
    ForeignCalls,
    ResponsesForeign,
    screenshot,
)
from tureen.dialects.openai.responses_tools import joined_name
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import convert
from tureen.fields.tools import read_arguments
from tureen.requests.media_fields import file_text
from tureen.text.messages import MAX_PARTS, Message

KINDS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip
REFERENCE = "item_reference"
PREFIXES = {**dict(zip(KINDS, ("msg", "fc", "fc", "ctc", "ctc", "rs"), strict=True)), **FOREIGN}
"""Type of an item -> the beginning of its id."""
PART_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "output_text": {"annotations": [], "logprobs": []},
    "input_image": {"detail": "auto"},
}
REASONING_PARTS = {"content": ("reasoning_text",), "output": (), "summary": ("summary_text",)}
PARTS = ("input_text", "input_image", "input_file", "output_text", "refusal")

SEAL = "tureen1."
"""Beginning of the `encrypted_content` that this server makes."""

T = TypeVar("T")

MAX_SENT_LOGPROBS = 1 << 17  # of an answer that a client sends back

PartList = Annotated[list[T], Meta(max_length=MAX_PARTS)]
Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesInputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_text"):
    """Text of the user or the system."""

    text: str


class ResponsesInputImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_image"):
    """`detail`: pictures always have the model's full resolution."""

    image_url: Annotated[str, Meta(min_length=1)]
    detail: str | None = None


class ResponsesInputFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_file"):
    """A text file, in base64: the model reads its name and its text."""

    file_data: str
    filename: str | None = None


class ResponsesOutputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="output_text"):
    """Text of an answer that the client sends back, with what that said about it: the model is shown the text."""

    text: str
    annotations: PartList[Any] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=MAX_SENT_LOGPROBS)] | None = None


class ResponsesRefusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refusal"):
    """A refusal in an answer of another model that the client sends back."""

    refusal: str


Shown = ResponsesInputText | ResponsesInputImage | ResponsesInputFile


class ResponsesMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="message"):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | PartList[Shown | ResponsesOutputText | ResponsesRefusal]
    id: str | None = None
    status: Status | None = None


class ResponsesFunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function_call"):
    """A function call of an answer that the client sends back."""

    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str | None, Meta(description="A JSON object, as text. Default: {}.")] = None
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
    namespace: str | None = None
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


class ResponsesSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="summary_text"):
    """A piece of a summary of reasoning."""

    text: str


class ResponsesReasoningItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reasoning"):
    """Reasoning of an answer that the client sends back: the model is shown its text; without one `encrypted_content`,
    which this server made; without that its summary."""

    id: str | None = None
    summary: PartList[ResponsesSummary] | None = None
    content: PartList[ResponsesThought] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ResponsesReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="item_reference"):
    """A kept item, by its id."""

    id: str


SentItem = (
    ResponsesMessage
    | ResponsesFunctionCall
    | ResponsesCallOutput
    | ResponsesCustomCall
    | ResponsesCustomOutput
    | ResponsesReasoningItem
    | ResponsesReference
)
ResponsesItem = SentItem | ResponsesForeign
"""An item as `read_items` returns it; no client sends a ResponsesForeign."""


def read_items(sent_items: Sequence[Any], name: str = "input") -> list[Any]:
    """Returns the items without nulls; a message without a type gets it. `name`: the field that has them. Raises
    InvalidRequest for unknown types."""
    items = []
    for index, item in enumerate(sent_items):
        if isinstance(item, dict):
            item = {name: value for name, value in item.items() if value is not None}
            if "type" not in item and "role" in item:
                item["type"] = "message"
            elif item.keys() == {"id"}:
                item["type"] = REFERENCE
            if item.get("type") in FOREIGN:
                items.append({"type": ResponsesForeign.__struct_config__.tag, "item": item})
                continue
            _check_type(item, (*KINDS, REFERENCE, *FOREIGN), f"{name}[{index}]")
            for field in ("content", "output", "summary"):
                if isinstance(item.get(field), list) and len(item[field]) <= MAX_PARTS:
                    item[field] = _parts(item, field, f"{name}[{index}].{field}")
        items.append(item)
    return items


def _parts(item: Mapping[str, Any], field: str, where: str) -> list[Any]:
    parts = []
    for index, part in enumerate(item[field]):
        if isinstance(part, dict):
            part = {name: value for name, value in part.items() if value is not None}
            refuse_audio(part.get("type"), f"{where}[{index}]")
            known = REASONING_PARTS[field] if item["type"] == "reasoning" else PARTS
            _check_type(part, known, f"{where}[{index}]")
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
        self.sources: list[list[str]] = []  # for each message the items that it was made of, as errors name them
        self._foreign = ForeignCalls()
        self._names: dict[str, str] = {}  # call_id of each call so far -> the function's name
        self._texts: list[str] = []  # texts of the last message, which may get more
        self._is_turn = False  # the last message is the assistant's, and more of its turn may follow

    def add(self, item: ResponsesItem, where: str) -> None:
        """Adds an item; `where` names it in errors. Raises InvalidRequest."""
        self._add(item, where)
        if self.sources:  # a reasoning item without text makes no message
            self.sources[-1].append(where)

    def _add(self, item: ResponsesItem, where: str) -> None:
        if isinstance(item, ResponsesReference):
            raise InvalidRequest(f"{where} refers to an unknown item; send the item itself", field=where)
        if isinstance(item, ResponsesForeign):
            self._add_foreign(item.item, where)
        elif isinstance(item, ResponsesCallOutput | ResponsesCustomOutput):
            self._add_output(item, where)
        elif isinstance(item, ResponsesFunctionCall | ResponsesCustomCall):
            self._names[item.call_id] = name = joined_name(item.namespace, item.name)
            sent = {"input": item.input} if isinstance(item, ResponsesCustomCall) else read_arguments(item.arguments)
            self._add_call(item.call_id, name, sent)
        elif isinstance(item, ResponsesReasoningItem):
            text = _reasoning(item, where)
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
        self.sources.append([])

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

    def _add_call(self, call_id: str, name: str, arguments: dict[str, Any] | str) -> None:
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _add_foreign(self, item: Mapping[str, Any], where: str) -> None:
        """Adds an item of a tool that another server ran. Raises InvalidRequest for the result of an unknown call."""
        if item["type"] == COMPACTION:
            ignored.tell(where, "another server encrypted it, so it cannot be read here")
            return
        call = self._foreign.call(item, where)
        if call is not None:
            self._add_call(call.id, call.name, call.arguments)
            if call.result is not None:
                self._add_result(call, call.result)
            return
        shown = screenshot(item)
        called = self._foreign.called(item, where)
        if shown is not None:
            self._add_result(called, self._joined([ResponsesInputImage(image_url=shown)], where))
        else:
            self._add_result(called, called.result or "")

    def _add_result(self, call: ForeignCall, content: str | list[dict[str, Any]]) -> None:
        self._begin({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})

    def _add_output(self, item: ResponsesCallOutput | ResponsesCustomOutput, where: str) -> None:
        name = self._names.get(item.call_id)
        if name is None:
            raise InvalidRequest(
                f"{where}.call_id {echo(item.call_id)} does not match an earlier call", field=f"{where}.call_id"
            )
        content = item.output if isinstance(item.output, str) else self._joined(item.output, f"{where}.output")
        self._begin({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": content})

    def _shown(self, item: ResponsesMessage, where: str) -> str | list[dict[str, Any]]:
        if isinstance(item.content, str):
            return item.content
        parts: list[Shown] = []
        for index, part in enumerate(item.content):
            is_picture = isinstance(part, ResponsesInputImage)
            if not isinstance(part, Shown) or (is_picture and item.role != "user"):
                raise _misplaced(part, item.role, f"{where}.content[{index}]")
            parts.append(part)
        return self._joined(parts, f"{where}.content")

    def _joined(self, parts: Sequence[Shown], where: str) -> str | list[dict[str, Any]]:
        """Converts parts, which stand at `where`; returns a string when all are text."""
        template_parts: list[dict[str, Any]] = []
        for index, part in enumerate(parts):
            if isinstance(part, ResponsesInputImage):
                self.pictures.append(part.image_url)
                tell_detail(part.detail, f"{where}[{index}].detail")
                template_parts.append({"type": "image"})
                continue
            field = f"{where}[{index}].file_data"
            if isinstance(part, ResponsesInputFile):
                text = file_text(part.file_data, part.filename, field, "input_text")
            else:
                text = part.text
            template_parts.append({"type": "text", "text": text})
        if all(part["type"] == "text" for part in template_parts):
            return "".join(part["text"] for part in template_parts)
        return template_parts

    def _text(self, item: ResponsesMessage, where: str) -> str:
        if isinstance(item.content, str):
            return item.content
        texts = []
        for index, part in enumerate(item.content):
            if isinstance(part, ResponsesInputImage | ResponsesInputFile):
                raise _misplaced(part, item.role, f"{where}.content[{index}]")
            texts.append(part.refusal if isinstance(part, ResponsesRefusal) else part.text)
        return "".join(texts)


def conversation_of(
    items: str | Sequence[ResponsesItem], instructions: str | None, before: Sequence[Any] = (), continued: str = ""
) -> ResponsesConversation:
    """Converts `input` and `instructions` to a conversation that continues the kept items `before`, which the field
    `continued` names. Raises InvalidRequest."""
    conversation = ResponsesConversation()
    if instructions:
        conversation.add_message("system", instructions)
    for index, item in enumerate(convert(read_items(before, continued), list[ResponsesItem])):
        conversation.add(item, f"{continued}[{index}]")
    if isinstance(items, str):
        conversation.add_message("user", items)
        conversation.sources[-1].append("input")
    else:
        for index, item in enumerate(items):
            conversation.add(item, f"input[{index}]")
    conversation.close()
    if not conversation.messages:
        raise InvalidRequest("input is empty; send a text or items", field="input", code="empty_prompt")
    return conversation


def kept_items(sent: str | Sequence[ResponsesItem]) -> list[dict[str, Any]]:
    """Returns the items of an `input` as they are kept: each with its type, an id and a status, as the API's own lists
    of items have them."""
    if isinstance(sent, str):
        sent = [ResponsesMessage(role="user", content=sent)]
    return [_kept(_plain(item)) for item in sent]


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    """Returns an item or a part as JSON has it, without the fields that were not sent."""
    if isinstance(struct, ResponsesForeign):
        return dict(struct.item)
    fields = {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = [_plain(entry) if isinstance(entry, msgspec.Struct) else entry for entry in value]
    return {"type": struct.__struct_config__.tag} | fields


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    item_id = f"{PREFIXES[item['type']]}_{uuid.uuid4().hex}"
    if item["type"] in FOREIGN:
        return {"id": item_id} | item  # the model reads its status
    kept = {"id": item_id, "status": "completed"} | item
    if item["type"] == "reasoning":
        return {"summary": []} | kept
    if item["type"] == "message":
        is_answer, parts = item["role"] == "assistant", item["content"]
        if isinstance(parts, str):
            parts = [{"type": "output_text" if is_answer else "input_text", "text": parts}]
        kept["content"] = [{**PART_DEFAULTS.get(part["type"], {}), **part} for part in parts]
    return kept


def sealed(reasoning: str) -> str:
    """Returns reasoning as `encrypted_content`, for clients that keep and send back nothing else of it. It hides
    nothing: `content` has the same text."""
    return SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _reasoning(item: ResponsesReasoningItem, where: str) -> str:
    """Returns the text of reasoning. If another server has encrypted it, it is reported as ignored."""
    text = "".join(part.text for part in item.content or ())
    if not text and item.encrypted_content is not None:
        seal, _, code = item.encrypted_content.partition(SEAL)
        with contextlib.suppress(ValueError):
            text = base64.b64decode(code, altchars=b"-_", validate=True).decode() if not seal else ""
        if not text and item.encrypted_content != SEAL:
            ignored.tell(f"{where}.encrypted_content", "another server encrypted it")
    return text or "\n\n".join(part.text for part in item.summary or ())


def _misplaced(part: msgspec.Struct, role: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: a message of role {role} has no {part.__struct_config__.tag} parts", field=f"{where}.type"
    )
