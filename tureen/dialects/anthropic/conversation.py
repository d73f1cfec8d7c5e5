"""Converts Anthropic's messages to those of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tureen.dialects.anthropic.body import (
    AnthropicCompactionBlock,
    AnthropicDocumentBlock,
    AnthropicEncodedSource,
    AnthropicFetchedSource,
    AnthropicImageBlock,
    AnthropicMessage,
    AnthropicRedactedThinkingBlock,
    AnthropicSearchResultBlock,
    AnthropicServerToolResultBlock,
    AnthropicServerToolUseBlock,
    AnthropicTextBlock,
    AnthropicTextSource,
    AnthropicThinkingBlock,
    AnthropicToolResultBlock,
    AnthropicToolUseBlock,
    AnthropicUploadBlock,
    Block,
    ShownBlock,
)
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.text.messages import Message

ERROR_MARK = "Error:"
"""Text put before the result of a tool that failed (`is_error`): chat templates have no field for it."""


class AnthropicConversation:
    """Messages as chat templates take them, built turn by turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: list[str] = []
        self.continues_last = False  # the last message is the assistant's and not complete
        self._names: dict[str, str] = {}  # id of each tool call so far -> the tool's name

    def add_system(self, texts: Sequence[str]) -> None:
        """Adds a system message of several texts."""
        self.messages.append({"role": "system", "content": "\n".join(texts)})

    def add_user(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Adds a turn of the user; each tool result becomes a message of its own. `blocks`: path for errors, block.

        Raises InvalidRequest.
        """
        parts: list[dict[str, Any]] = []
        num_before = len(self.messages)
        for path, block in blocks:
            if isinstance(block, AnthropicToolResultBlock):
                self._add_parts(parts)
                parts = []
                self._add_result(path, block)
            elif isinstance(block, ShownBlock):
                parts += self._parts(path, block)
            elif isinstance(block, AnthropicUploadBlock):
                ignored.tell(path, "the server keeps no files for tools")
            else:
                raise _misplaced(path, block, "user")
        if len(self.messages) == num_before and not parts:  # such as a document without text
            parts = [{"type": "text", "text": ""}]
        self._add_parts(parts)

    def add_assistant(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Adds a turn of the assistant. `blocks`: path for errors, block. Raises InvalidRequest.

        A result of a tool that a server ran ends the message before it, and follows as a message of its own.
        """
        turn: list[tuple[str, Block]] = []
        for path, block in blocks:
            if isinstance(block, AnthropicServerToolResultBlock):
                self._add_answer(turn)
                turn = []
                self._add_server_result(path, block)
            else:
                turn.append((path, block))
        if turn or not blocks:
            self._add_answer(turn)

    def _add_server_result(self, path: str, block: AnthropicServerToolResultBlock) -> None:
        name = self._name_of(path, block.tool_use_id)
        content = msgspec.json.encode(_readable(block.content)).decode()
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content})

    def _add_answer(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Adds a message of the assistant. Raises InvalidRequest."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for path, block in blocks:
            if isinstance(block, AnthropicTextBlock):
                texts.append(block.text)
            elif isinstance(block, AnthropicCompactionBlock):
                texts += [block.content] if block.content else []
            elif isinstance(block, AnthropicThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, AnthropicRedactedThinkingBlock):
                ignored.tell(path, "another server encrypted it, so it cannot be read here")
            elif isinstance(block, AnthropicToolUseBlock | AnthropicServerToolUseBlock):
                self._names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            else:
                raise _misplaced(path, block, "assistant")
        message: Message = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _add_parts(self, parts: list[dict[str, Any]]) -> None:
        if parts:
            self.messages.append({"role": "user", "content": _content(parts)})

    def _add_result(self, path: str, block: AnthropicToolResultBlock) -> None:
        name = self._name_of(path, block.tool_use_id)
        result_blocks: Sequence[ShownBlock] = (
            [AnthropicTextBlock(text=block.content)] if isinstance(block.content, str) else block.content or []
        )
        parts = [{"type": "text", "text": ERROR_MARK}] if block.is_error else []
        for number, content_block in enumerate(result_blocks):
            parts += self._parts(f"{path}.content[{number}]", content_block)
        self.messages.append(
            {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": _content(parts)}
        )

    def _name_of(self, path: str, call: str) -> str:
        """Returns the name of the tool that a result is of. Raises InvalidRequest."""
        if call not in self._names:
            raise InvalidRequest(
                f"{path}.tool_use_id {echo(call)} does not match an earlier tool_use block", field=f"{path}.tool_use_id"
            )
        return self._names[call]

    def _parts(self, path: str, block: ShownBlock) -> list[dict[str, Any]]:
        """Returns a block as parts of a message. Raises InvalidRequest for a document that cannot be read here."""
        if isinstance(block, AnthropicSearchResultBlock):
            texts = [block.title, block.source, *(shown.text for shown in block.content)]
            return [{"type": "text", "text": text} for text in texts if text]
        if not isinstance(block, AnthropicDocumentBlock):
            return [self._part(block)]
        source = block.source
        if isinstance(source, AnthropicEncodedSource | AnthropicFetchedSource):
            raise InvalidRequest(
                f"{path}.source: this server does not read PDFs or fetch documents; send the text as a source of type "
                "text",
                field=f"{path}.source",
                code="not_available",
            )
        heads = [AnthropicTextBlock(text=text) for text in (block.title, block.context) if text]
        content = source.data if isinstance(source, AnthropicTextSource) else source.content
        blocks = [AnthropicTextBlock(text=content)] if isinstance(content, str) else content
        return [self._part(shown) for shown in (*heads, *blocks)]

    def _part(self, block: AnthropicTextBlock | AnthropicImageBlock) -> dict[str, Any]:
        if isinstance(block, AnthropicTextBlock):
            return {"type": "text", "text": block.text}
        self.pictures.append(block.reference)
        return {"type": "image"}


def conversation_of(
    messages: Sequence[AnthropicMessage], system: str | Sequence[AnthropicTextBlock] | None
) -> AnthropicConversation:
    """Converts messages and system prompt; consecutive messages of one role become one. Raises InvalidRequest."""
    conversation = AnthropicConversation()
    if system:
        conversation.add_system([system] if isinstance(system, str) else [block.text for block in system])
    role, turn = "", list[tuple[str, Block]]()
    for index, message in enumerate(messages):
        if message.role != role:
            _add_turn(conversation, role, turn)
            role, turn = message.role, []
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            turn.append((path, AnthropicTextBlock(text=message.content)))
        elif not message.content and role == "user":
            raise InvalidRequest(f"{path} is empty; it has at least one block", field=path)
        else:
            turn += [(f"{path}[{number}]", block) for number, block in enumerate(message.content)]
    _add_turn(conversation, role, turn)
    conversation.continues_last = conversation.messages[-1]["role"] == "assistant"
    if conversation.continues_last and conversation.messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "messages ends with a tool_use block; add a user message with its tool_result",
            field="messages",
        )
    return conversation


def _add_turn(conversation: AnthropicConversation, role: str, turn: Sequence[tuple[str, Block]]) -> None:
    if role == "user":
        conversation.add_user(turn)
    elif role == "assistant":
        conversation.add_assistant(turn)
    elif role == "system":
        for path, block in turn:
            if not isinstance(block, AnthropicTextBlock):
                raise _misplaced(path, block, "system")
        conversation.add_system([block.text for _, block in turn if isinstance(block, AnthropicTextBlock)])


def _misplaced(path: str, block: Block, role: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"{path}: a message of role {role} has no {kind} blocks", field=f"{path}.type")


def _readable(value: Any) -> Any:
    """Returns the result of a tool without the parts that only the server that ran it can read."""
    if isinstance(value, list):
        return [_readable(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _readable(entry) for name, entry in value.items() if not name.startswith("encrypted_")}
    return value


def _content(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Joins parts that are all text to a string, which every chat template takes."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)
