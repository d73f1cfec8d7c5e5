"""Defines the values that a chat consists of, independent of the API. Messages are dicts, as chat templates read
them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Message = dict[str, Any]
"""A message has role and content (a string, or a list of {"type": "text", "text"}, {"type": "image"} and {"type":
"video"}), and may have name, reasoning_content, tool_call_id, and tool_calls as [{"id", "type": "function", "function":
{"name", "arguments": an object, or text if a model wrote something else}}]."""

MAX_MESSAGES = 4096
"""The largest number of messages of a chat."""

MAX_PARTS = 4096
"""The largest number of parts of a message's content."""

MAX_CALLS = 1024
"""The largest number of tool calls in one message."""

ROLES = ("system", "user", "assistant", "tool")


class FreeInput(msgspec.Struct, frozen=True, kw_only=True):
    """The text that a custom tool takes: any, or one that a grammar allows."""

    syntax: Literal["text", "lark", "regex"] = "text"
    definition: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}  # JSON schema of its arguments, an object
    strict: bool = False  # its arguments must be valid against the schema, without being asked for
    free_input: FreeInput | None = None  # of a custom tool, whose only parameter is the string `input`

    def as_openai(self) -> dict[str, Any]:
        """Returns the dictionary that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model calls tools; `name`: with mode required, the tool that it must call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


class Content(msgspec.Struct, frozen=True):
    """A piece of the answer's text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The beginning of a tool call; its arguments follow."""

    index: int  # of the call in the answer, from 0
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of a call, which are JSON text when joined."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments
