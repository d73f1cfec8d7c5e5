"""Adapts a chat to what its template can render: writes tools, calls and their results as text, joins text parts, puts
placeholders of pictures into the text.

Tools are written in the format of the Hermes models: tools and calls as JSON in tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from tureen.errors import InvalidRequest
from tureen.text.messages import Message

TOOL_TEXT: Final = """You can call the tools listed here, one JSON object a line:
<tools>
{tools}
</tools>
To call a tool, answer with a JSON object that has the tool's name and its arguments, inside tags:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Several calls are several such blocks. Results come back inside <tool_response> tags. When no tool is needed, just \
answer."""


SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
"""Form of tool-call ids that Mistral's templates demand."""


class Abilities(NamedTuple):
    """The abilities of a chat template, found out by rendering test chats."""

    tools: bool = True
    system: bool = True
    strings: bool = True  # content may be a string
    parts: bool = False  # content may be a list of parts
    placed: frozenset[str] = frozenset()  # kinds of parts, image and video, for which it writes a placeholder
    call_strings: bool = False  # a call's arguments must be JSON text
    call_texts: bool = True  # a call's arguments may be text that is no JSON
    short_ids: bool = False  # the ids of calls must be SHORT_ID
    marked_roles: bool = False  # it builds control tokens out of roles, such as '<|' + role + '|>'


def adapted(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    abilities: Abilities,
    placeholders: Mapping[str, str],
    field: str,
) -> list[Message]:
    """Returns the chat in a form that a template with these abilities can render.

    `placeholders`: image, video -> the text that stands for it. Raises InvalidRequest with `field` for parts that the
    model does not take.
    """
    filled = [
        {"content": ""} | {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    if not abilities.tools:
        filled = _with_tools_as_text(filled, tools, abilities, placeholders, field)
    return [_adapted(message, abilities, placeholders, field) for message in filled]


def _adapted(message: Message, abilities: Abilities, placeholders: Mapping[str, str], field: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        if abilities.parts:
            content = [part if _stays(part, abilities) else _text_part(part, placeholders, field) for part in content]
        else:
            content = joined(content, placeholders, field)
    elif not abilities.strings:
        content = [{"type": "text", "text": content}] if content else []
    changed = {"content": content}
    if "tool_calls" in message:
        changed["tool_calls"] = [_adapted_call(call, abilities) for call in message["tool_calls"]]
    if abilities.short_ids and "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "reasoning_content" in message:
        changed["thinking"] = message["reasoning_content"]  # its name in some templates
    return {**message, **changed}


def _stays(part: dict[str, Any], abilities: Abilities) -> bool:
    return part["type"] == "text" or part["type"] in abilities.placed


def _text_part(part: dict[str, Any], placeholders: Mapping[str, str], field: str) -> dict[str, Any]:
    return {"type": "text", "text": joined([part], placeholders, field) + "\n"}


def joined(content: str | list[dict[str, Any]], placeholders: Mapping[str, str], field: str) -> str:
    """Joins parts to one text, a line each. Raises InvalidRequest with `field` for parts that the model does not
    take."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if part["type"] == "text" else placeholders.get(part["type"])
        if text is None:
            raise InvalidRequest(f"{field}: this model takes no {part['type']}s", field=field)
        texts.append(text)
    return "\n".join(texts)


def _adapted_call(call: dict[str, Any], abilities: Abilities) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = arguments if abilities.call_texts else {"input": arguments}
    elif abilities.call_strings:
        arguments = _json(arguments)
    call = {**call, "function": {**function, "arguments": arguments}}
    return {**call, "id": _short(call["id"])} if abilities.short_ids else call


def _short(name: str) -> str:
    """Returns a short id, the same for the same id."""
    if SHORT_ID.fullmatch(name):
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_tools_as_text(
    messages: list[Message],
    tools: Sequence[dict[str, Any]],
    abilities: Abilities,
    placeholders: Mapping[str, str],
    field: str,
) -> list[Message]:
    converted: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = [joined(message["content"], placeholders, field) for message in group]
            text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
            converted.append({"role": "user", "content": text})
        else:
            converted += [_with_calls_as_text(message) if message.get("tool_calls") else message for message in group]
    if tools:
        _put_in_front(converted, TOOL_TEXT.format(tools="\n".join(_json(tool) for tool in tools)), abilities)
    return converted


def _with_calls_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [_json({"name": function["name"], "arguments": function["arguments"]}) for function in functions]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _before(message["content"], text, "\n")}


def _before(content: str | list[dict[str, Any]], text: str, gap: str) -> Any:
    """Returns the content with `text` appended, after `gap` when both are strings."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}{gap}{text}" if content else text


def _put_in_front(messages: list[Message], text: str, abilities: Abilities) -> None:
    """Puts `text` into the system message, or into the user's first message when the template has no system
    messages."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": _before(messages[0]["content"], text, "\n\n")}
    elif abilities.system or first is None:
        messages.insert(0, {"role": "system", "content": text})
    else:
        content = messages[first]["content"]
        parts = [{"type": "text", "text": text}, *content] if isinstance(content, list) else f"{text}\n\n{content}"
        messages[first] = {**messages[first], "content": parts}
