"""Does what a chat template cannot do: writes tools, calls and their results as text, joins text parts, places
pictures.

Tools are written as the models of the Hermes family were taught: the tools and calls as JSON in tags.
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
"""The ids of calls as Mistral's templates demand them."""


class Abilities(NamedTuple):
    """The abilities of a chat template."""

    tools: bool = True
    system: bool = True
    strings: bool = True  # content may be a string
    parts: bool = False  # content may be a list of parts
    placed: frozenset[str] = frozenset()  # of image and video: parts that it writes a placeholder for
    call_strings: bool = False  # a call's arguments must be JSON text
    short_ids: bool = False  # the ids of calls must be SHORT_ID
    marked_roles: bool = False  # it makes control tokens of roles


def adapted(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    able: Abilities,
    placeholders: Mapping[str, str],
    field: str,
) -> list[Message]:
    """The chat as the template can take it. placeholders: what stands for an image, for a video.

    Raises InvalidRequest for parts that the model does not take.
    """
    found = [{"content": ""} | {key: value for key, value in one.items() if value is not None} for one in messages]
    if not able.tools:
        found = _with_tools_as_text(found, tools, able, placeholders, field)
    return [_adapted(message, able, placeholders, field) for message in found]


def _adapted(message: Message, able: Abilities, placeholders: Mapping[str, str], field: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        if able.parts:
            content = [part if _stays(part, able) else _text_part(part, placeholders, field) for part in content]
        else:
            content = joined(content, placeholders, field)
    elif not able.strings:
        content = [{"type": "text", "text": content}] if content else []
    changed = {"content": content}
    if "tool_calls" in message:
        changed["tool_calls"] = [_adapted_call(call, able) for call in message["tool_calls"]]
    if able.short_ids and "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if "reasoning_content" in message:
        changed["thinking"] = message["reasoning_content"]  # what some templates call it
    return {**message, **changed}


def _stays(part: dict[str, Any], able: Abilities) -> bool:
    return part["type"] == "text" or part["type"] in able.placed


def _text_part(part: dict[str, Any], placeholders: Mapping[str, str], field: str) -> dict[str, Any]:
    return {"type": "text", "text": joined([part], placeholders, field) + "\n"}


def joined(content: str | list[dict[str, Any]], placeholders: Mapping[str, str], field: str) -> str:
    """Parts as one text, each on a line of its own. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if part["type"] == "text" else placeholders.get(part["type"])
        if text is None:
            raise InvalidRequest(f"{field}: this model takes no {part['type']}s", field=field)
        texts.append(text)
    return "\n".join(texts)


def _adapted_call(call: dict[str, Any], able: Abilities) -> dict[str, Any]:
    if able.call_strings:
        function = call["function"]
        call = {**call, "function": {**function, "arguments": _json(function["arguments"])}}
    return {**call, "id": _short(call["id"])} if able.short_ids else call


def _short(name: str) -> str:
    """The same for the same id."""
    if SHORT_ID.fullmatch(name):
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_tools_as_text(
    messages: list[Message],
    tools: Sequence[dict[str, Any]],
    able: Abilities,
    placeholders: Mapping[str, str],
    field: str,
) -> list[Message]:
    found: list[Message] = []
    for is_result, group in groupby(messages, key=lambda one: one["role"] == "tool"):
        if is_result:
            results = [joined(one["content"], placeholders, field) for one in group]
            text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
            found.append({"role": "user", "content": text})
        else:
            found += [_with_calls_as_text(one) if one.get("tool_calls") else one for one in group]
    if tools:
        _put_in_front(found, TOOL_TEXT.format(tools="\n".join(_json(tool) for tool in tools)), able)
    return found


def _with_calls_as_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [_json({"name": one["name"], "arguments": one["arguments"]}) for one in functions]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _before(message["content"], text, "\n")}


def _before(content: str | list[dict[str, Any]], text: str, gap: str) -> Any:
    """The content, then the text."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}{gap}{text}" if content else text


def _put_in_front(messages: list[Message], text: str, able: Abilities) -> None:
    """Into the system message, or where the template has none into the first of the user's."""
    first = next((index for index, one in enumerate(messages) if one["role"] == "user"), None)
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": _before(messages[0]["content"], text, "\n\n")}
    elif able.system or first is None:
        messages.insert(0, {"role": "system", "content": text})
    else:
        content = messages[first]["content"]
        parts = [{"type": "text", "text": text}, *content] if isinstance(content, list) else f"{text}\n\n{content}"
        messages[first] = {**messages[first], "content": parts}
