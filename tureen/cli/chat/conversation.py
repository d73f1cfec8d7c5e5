"""A conversation: its messages, how answers are drawn, what they cost; and the body of a request for the next one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tureen.cli.chat.connection import ChatError, ServerAddress
from tureen.cli.places import counted
from tureen.files import read_regular


class Message(msgspec.Struct):
    """A turn. `was_cut`: the answer was interrupted, or ended at a limit."""

    role: Literal["user", "assistant"]
    content: str
    was_cut: bool = False


class AnswerPiece(NamedTuple):
    """A part of an answer as it comes; `is_thought`: it is reasoning, which is not part of the answer."""

    text: str
    is_thought: bool = False


class Cost(msgspec.Struct):
    """Tokens and seconds of one answer. `tokens_per_s`: as the server measured it; None if it did not."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    tokens_per_s: float | None = None


class Conversation(msgspec.Struct):
    """A conversation as `/save` writes it: everything that the next answer depends on."""

    model: str = "default"
    system: str = ""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    schema: dict[str, Any] | None = None
    messages: list[Message] = msgspec.field(default_factory=list)
    costs: list[Cost] = msgspec.field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Returns the body of a streamed POST /v1/chat/completions for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + [{"role": turn.role, "content": turn.content} for turn in self.messages],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},  # cut answers cost tokens, too
            "return_meta_info": True,
        }
        if self.schema is not None:
            body["response_format"] = {"type": "json_object", "schema": self.schema}
        return body | self.settings

    def answer(self, server: ServerAddress) -> Iterator[AnswerPiece]:
        """Yields the answer to the last message as it comes, and appends it to the messages, cut or whole, when it ends
        or the iterator is closed. Raises ChatError; nothing is appended then but what had come."""
        turn, cost, started = Message("assistant", "", was_cut=True), Cost(), time.perf_counter()
        events = server.events("/v1/chat/completions", self.body())
        try:
            for event in events:
                for piece in _pieces(event):
                    cost.first_token_s = cost.first_token_s or time.perf_counter() - started
                    turn.content += "" if piece.is_thought else piece.text
                    yield piece
                _note(event, turn, cost)
        finally:
            events.close()  # type: ignore[attr-defined]
            if cost.completion_tokens:
                self.costs.append(cost)
            if turn.content or not turn.was_cut:
                self.messages.append(turn)

    def take_back(self, index: int | None = None) -> str:
        """Removes the message of the user with that number (from 1; None = the last) and what follows it; returns its
        text. Raises ChatError where there is none."""
        places = [place for place, turn in enumerate(self.messages) if turn.role == "user"]
        if not places:
            raise ChatError("you have sent no messages yet")
        number = len(places) if index is None else index
        if not 1 <= number <= len(places):
            raise ChatError(f"you have no message {number}; you have sent {counted(len(places), 'message')}")
        text = self.messages[places[number - 1]].content
        del self.messages[places[number - 1] :]
        return text

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON. Raises ChatError."""
        text = json.dumps(msgspec.to_builtins(self), ensure_ascii=False, indent=2) + "\n"
        try:
            path.expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise ChatError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> Conversation:
    """Reads what `save` wrote. Raises ChatError."""
    try:
        return msgspec.json.decode(read_regular(path.expanduser()), type=Conversation)
    except OSError as error:
        raise ChatError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ChatError(f"{path} is not a saved conversation: {error}") from None


def _pieces(event: dict[str, Any]) -> Iterator[AnswerPiece]:
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content"):
            yield AnswerPiece(thought, is_thought=True)
        if text := delta.get("content"):
            yield AnswerPiece(text)


def _note(event: dict[str, Any], turn: Message, cost: Cost) -> None:
    """Takes the end and the usage from an event that has them."""
    for choice in event.get("choices", ()):
        if (reason := choice.get("finish_reason")) is not None:
            turn.was_cut = reason == "length"
            cost.tokens_per_s = choice.get("meta_info", {}).get("decode_throughput")
    if usage := event.get("usage"):
        cost.prompt_tokens, cost.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        cost.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
