"""From Ollama's bodies to chats."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from tureen.dialects.ollama.body import (
    PARAMETERS,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    sampling_of,
)
from tureen.errors import InvalidRequest, NotFound
from tureen.requests.chat import Chat
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import thinking_kwargs
from tureen.requests.tool_fields import choose, read_tools
from tureen.text.messages import Message, Tool, ToolChoice

LATEST = ":latest"
NAMES = Names(
    "",
    {PARAMETERS.get(name, name): f"options.{name}" for name in OllamaOptions.__struct_fields__}
    | {"json_schema": "format"},
)
DEFAULTS = {"max_new_tokens": None, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, for models that recommend nothing."""


class OllamaConversation:
    """Messages as chat templates take them. Calls of tools without ids get some, and results find their calls."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: list[str] = []
        self._made: list[tuple[str, str]] = []  # id and name
        self._done: set[int] = set()  # indices of calls
        self._waiting: defaultdict[tuple[str | None, str | None], deque[int]] = defaultdict(deque)
        """What a result can say of its call, id and name -> indices of the calls it fits, answered ones among them."""

    def add(self, given: OllamaMessage, path: str) -> None:
        """Raises InvalidRequest for fields that do not belong to the role."""
        belongs = {"thinking": "assistant", "tool_calls": "assistant", "tool_name": "tool", "tool_call_id": "tool"}
        for field, role in belongs.items():
            if getattr(given, field) is not None and given.role != role:
                raise InvalidRequest(f"{path}.{field} is for messages of role {role}", field=f"{path}.{field}")
        message: Message = {"role": given.role, "content": self._content(given)}
        if given.thinking:
            message["reasoning_content"] = given.thinking
        if given.tool_calls:
            message["tool_calls"] = self._calls(given)
        if given.role == "tool":
            message |= self._answered(given)
        self.messages.append(message)

    def _content(self, given: OllamaMessage) -> str | list[dict[str, Any]]:
        text = given.content or ""
        if not given.images:
            return text
        self.pictures += given.images
        pictures: list[dict[str, Any]] = [{"type": "image"} for _ in given.images]
        return [*pictures, {"type": "text", "text": text}]

    def _calls(self, given: OllamaMessage) -> list[dict[str, Any]]:
        calls = []
        for call in given.tool_calls or ():
            index, tool = len(self._made), call.function.name
            name = call.id or f"call{index + 1:05d}"
            self._made.append((name, tool))
            for key in ((None, None), (name, None), (None, tool), (name, tool)):
                self._waiting[key].append(index)
            function = {"name": tool, "arguments": call.function.arguments}
            calls.append({"id": name, "type": "function", "function": function})
        return calls

    def _answered(self, given: OllamaMessage) -> Message:
        """Which call a result is of: the one it says, else the first without one."""
        name, tool = given.tool_call_id, given.tool_name
        fits = self._waiting.get((name, tool), deque())
        while fits and fits[0] in self._done:
            fits.popleft()
        if fits:
            self._done.add(fits[0])
            name, tool = self._made[fits.popleft()]
        return {key: value for key, value in (("tool_call_id", name), ("name", tool)) if value is not None}


def chat_of(body: OllamaChatBody, given: dict[str, Any], state: ServerState) -> Chat:
    """Raises InvalidRequest, NotFound."""
    talk = OllamaConversation()
    for index, message in enumerate(body.messages):
        talk.add(message, f"messages[{index}]")
    tools = read_tools(body.tools)
    return Chat(
        messages=tuple(talk.messages),
        pictures=tuple(talk.pictures),
        tools=tools,
        tool_choice=choose(ToolChoice(), tools, "tools"),
        continue_final_message=body.messages[-1].role == "assistant" and not body.messages[-1].tool_calls,
        template_kwargs=_thinking(body, tools, state),
        sampling=sampling_of(body, given),
        defaults=DEFAULTS,
        names=NAMES,
        adapter=adapter(body.model, state),
    )


def prompt_chat(body: OllamaGenerateBody, given: dict[str, Any], state: ServerState) -> Chat:
    """A prompt as the one message of a chat. Raises InvalidRequest, NotFound."""
    talk = OllamaConversation()
    if body.system:
        talk.add(OllamaMessage(role="system", content=body.system), "system")
    talk.add(OllamaMessage(role="user", content=body.prompt, images=list(body.images)), "prompt")
    return Chat(
        messages=tuple(talk.messages),
        field="prompt",
        pictures=tuple(talk.pictures),
        template_kwargs=_thinking(body, (), state),
        sampling=sampling_of(body, given),
        defaults=DEFAULTS,
        names=NAMES,
        adapter=adapter(body.model, state),
    )


def _thinking(body: OllamaBody, tools: Sequence[Tool], state: ServerState) -> dict[str, bool]:
    return {} if body.think is None else thinking_kwargs(bool(body.think), "think", tools, state.context)


def adapter(model: str, state: ServerState) -> str:
    """The name of the adapter that `model` asks for; "" = none. Raises NotFound."""
    try:
        return adapter_of(model, state)
    except NotFound:
        if not model.endswith(LATEST):
            raise
        return adapter_of(model.removesuffix(LATEST), state)
