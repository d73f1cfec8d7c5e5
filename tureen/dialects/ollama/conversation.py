"""Converts Ollama's bodies to chats."""

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
from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.fields.tools import choose, read_tools
from tureen.requests.chat import Chat
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import effort_kwargs, knows_effort, thinking_kwargs
from tureen.text.messages import Message, Tool, ToolChoice

NAMES = Names(
    "",
    {PARAMETERS.get(name, name): f"options.{name}" for name in OllamaOptions.__struct_fields__}
    | {"json_schema": "format"},
)
DEFAULTS = {"max_new_tokens": None, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_last_n": 64}
"""Ollama's default sampling parameters, which the model's own and the server's go before."""


class OllamaConversation:
    """Builds messages as chat templates take them. Tool calls without ids get some, and each tool result is matched
    with its call."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: list[str] = []
        self._call_ids: list[tuple[str, str]] = []  # id and tool name of each call
        self._answered: set[int] = set()  # indices of calls that have a result
        self._candidates: defaultdict[tuple[str | None, str | None], deque[int]] = defaultdict(deque)
        """Id and tool name in a result, None = absent -> indices of the calls that fit, answered ones among them."""

    def add(self, ollama_message: OllamaMessage, path: str) -> None:
        """Adds a message; `path` names it in errors. Raises InvalidRequest for fields that do not belong to its
        role."""
        belongs = {"thinking": "assistant", "tool_calls": "assistant", "tool_name": "tool", "tool_call_id": "tool"}
        for field, role in belongs.items():
            if getattr(ollama_message, field) is not None and ollama_message.role != role:
                raise InvalidRequest(f"{path}.{field} is for messages of role {role}", field=f"{path}.{field}")
        message: Message = {"role": ollama_message.role, "content": self._content(ollama_message)}
        if ollama_message.thinking:
            message["reasoning_content"] = ollama_message.thinking
        if ollama_message.tool_calls:
            message["tool_calls"] = self._calls(ollama_message)
        if ollama_message.role == "tool":
            message |= self._call_of(ollama_message)
        self.messages.append(message)

    def _content(self, ollama_message: OllamaMessage) -> str | list[dict[str, Any]]:
        text = ollama_message.content or ""
        if not ollama_message.images:
            return text
        self.pictures += ollama_message.images
        pictures: list[dict[str, Any]] = [{"type": "image"} for _ in ollama_message.images]
        return [*pictures, {"type": "text", "text": text}]

    def _calls(self, ollama_message: OllamaMessage) -> list[dict[str, Any]]:
        calls = []
        for call in ollama_message.tool_calls or ():
            index, tool = len(self._call_ids), call.function.name
            name = call.id or f"call{index + 1:05d}"
            self._call_ids.append((name, tool))
            for key in ((None, None), (name, None), (None, tool), (name, tool)):
                self._candidates[key].append(index)
            function = {"name": tool, "arguments": call.function.arguments}
            calls.append({"id": name, "type": "function", "function": function})
        return calls

    def _call_of(self, ollama_message: OllamaMessage) -> Message:
        """Returns the id and the tool name of the call that a result answers: the first unanswered call that fits."""
        name, tool = ollama_message.tool_call_id, ollama_message.tool_name
        fits = self._candidates.get((name, tool), deque())
        while fits and fits[0] in self._answered:
            fits.popleft()
        if fits:
            self._answered.add(fits[0])
            name, tool = self._call_ids[fits.popleft()]
        return {key: value for key, value in (("tool_call_id", name), ("name", tool)) if value is not None}


def chat_of(body: OllamaChatBody, payload: dict[str, Any], state: ServerState) -> Chat:
    """Converts a body of `/api/chat`; `payload`: the body as sent. Raises InvalidRequest, NotFound."""
    conversation = OllamaConversation()
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages[{index}]")
    tools = read_tools(body.tools)
    return Chat(
        messages=tuple(conversation.messages),
        pictures=tuple(conversation.pictures),
        tools=tools,
        tool_choice=choose(ToolChoice(), tools, "tools"),
        continue_final_message=body.messages[-1].role == "assistant" and not body.messages[-1].tool_calls,
        template_kwargs=_thinking(body, tools, state),
        sampling=sampling_of(body, payload),
        defaults=DEFAULTS,
        return_effective=body.return_effective,
        explain=body.options.explain,
        logprobs=body.logprob_spec,
        names=NAMES,
        adapter=adapter_of(body.model, state),
    )


def prompt_chat(body: OllamaGenerateBody, payload: dict[str, Any], state: ServerState) -> Chat:
    """Converts a body of `/api/generate`: its prompt becomes a user's message. Raises InvalidRequest, NotFound."""
    conversation = OllamaConversation()
    if body.system:
        conversation.add(OllamaMessage(role="system", content=body.system), "system")
    conversation.add(OllamaMessage(role="user", content=body.prompt, images=list(body.images)), "prompt")
    return Chat(
        messages=tuple(conversation.messages),
        field="prompt",
        pictures=tuple(conversation.pictures),
        template_kwargs=_thinking(body, (), state),
        sampling=sampling_of(body, payload),
        defaults=DEFAULTS,
        return_effective=body.return_effective,
        explain=body.options.explain,
        logprobs=body.logprob_spec,
        names=NAMES,
        adapter=adapter_of(body.model, state),
    )


def _thinking(body: OllamaBody, tools: Sequence[Tool], state: ServerState) -> dict[str, Any]:
    if isinstance(body.think, str) and knows_effort(tools, state.context):
        return dict(effort_kwargs(body.think, "think", tools, state.context))
    if isinstance(body.think, str):
        ignored.tell("think", "this model's chat template has no reasoning levels")
    return {} if body.think is None else dict(thinking_kwargs(bool(body.think), "think", tools, state.context))
