"""How an output is read as it grows: its text, and in chats the reasoning and the calls of tools in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tureen.contract.types import FinishReason
from tureen.text.free_input import FreeInputs
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning, Tool
from tureen.text.reasoning import ReasoningFormat, ReasoningParser
from tureen.text.tokenizer import Tokenizer
from tureen.text.tools import ToolFormat, ToolParser


class ReadableOutput(Protocol):
    """What is read of an output: all that there is so far."""

    text: str
    token_ids: list[int]
    finish: FinishReason | None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How outputs are read: what of them is text, reasoning, calls of tools. As it stands here, all is text."""

    tools: tuple[Tool, ...] = ()  # that the model may call
    tool_format: ToolFormat | None = None
    parallel: bool = True  # it may call several in one answer
    reasoning: ReasoningFormat | None = None
    separate_reasoning: bool = True  # else it is a part of the answer's text, between its marks
    starts_inside: bool = False  # the prompt ends within the reasoning
    num_neutralised: int = 0  # control tokens that clients had written in their messages: they are plain text now

    @property
    def notes(self) -> dict[str, str]:
        """What OpenAI's answers tell in their metadata."""
        return {"neutralised_special_tokens": str(self.num_neutralised)} if self.num_neutralised else {}

    @property
    def custom_tools(self) -> frozenset[str]:
        """Returns the names of the tools that take a text."""
        return frozenset(tool.name for tool in self.tools if tool.free_input is not None)

    def reader(self) -> OutputReader:
        """A new one for each output."""
        reasoning = None
        if self.reasoning is not None and (self.separate_reasoning or self.tool_format is not None):
            reasoning = ReasoningParser(self.reasoning, starts_inside=self.starts_inside)
        calls = self.tool_format.parser(self.tools, parallel=self.parallel) if self.tool_format else None
        marks = None if self.separate_reasoning else self.reasoning
        return OutputReader(reasoning, calls, marks, FreeInputs(self.tools))

    def num_reasoning_tokens(self, output: ReadableOutput, answer: WholeAnswer, tokenizer: Tokenizer) -> int:
        """How many tokens of a whole output are its reasoning and the mark at its end."""
        if self.reasoning is None or not self.separate_reasoning or not answer.reasoning:
            return 0
        end, token_ids = self.reasoning.end, output.token_ids

        def has_ended(count: int) -> bool:
            return end in tokenizer.decode(token_ids[:count], skip_special_tokens=False)

        return min(bisect_left(range(1, len(token_ids) + 1), True, key=has_ended) + 1, len(token_ids))


class OutputReader:
    """Reads one output as it grows."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        marks: ReasoningFormat | None,
        inputs: FreeInputs,
    ) -> None:
        """marks: of reasoning that is to be a part of the text; None: it is not."""
        self._inputs = inputs
        self.has_calls = False
        self._reasoning = reasoning
        self._tools = tools
        self._marks = marks
        self._is_thinking = False
        self._num_chars = 0

    def catch_up(self, output: ReadableOutput) -> list[Part]:
        """What the output has grown by since the last call; with its finish the rest."""
        text = output.text[self._num_chars :]
        self._num_chars = len(output.text)
        has_ended = output.finish is not None
        parts: list[Part] = [Content(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(text) + (self._reasoning.close() if has_ended else [])
        if self._tools is not None:
            parts = self._inputs.feed(self._find_calls(self._tools, parts, has_ended=has_ended), has_ended=has_ended)
        self.has_calls = self.has_calls or any(isinstance(part, CallStart) for part in parts)
        return parts if self._marks is None else self._as_text(self._marks, parts)

    def _as_text(self, marks: ReasoningFormat, parts: Sequence[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            is_thought = isinstance(part, Reasoning)
            if is_thought != self._is_thinking:
                found.append(Content(f"{marks.begin}\n" if is_thought else f"\n{marks.end}\n\n"))
                self._is_thinking = is_thought
            found.append(Content(part.text) if isinstance(part, Reasoning) else part)
        return found

    def _find_calls(self, parser: ToolParser, parts: Sequence[Part], *, has_ended: bool) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            found += parser.feed(part.text) if isinstance(part, Content) else [part]
        return found + (parser.close() if has_ended else [])

    def finish_reason(self, output: ReadableOutput) -> str | None:
        """OpenAI's name of why it ended: stop, length, tool_calls or abort; None where it has not."""
        if output.finish is None:
            return None
        return "tool_calls" if output.finish.type == "stop" and self.has_calls else output.finish.type


class WholeAnswer(msgspec.Struct):
    """A whole output, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []  # name, and arguments as JSON text; of a custom tool its text


def joined(parts: Sequence[Part]) -> WholeAnswer:
    """The parts of a whole output together."""
    answer = WholeAnswer()
    for part in parts:
        match part:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case CallStart(_, name):
                answer.calls.append((name, ""))
            case CallArguments(index, text):
                name, arguments = answer.calls[index]
                answer.calls[index] = (name, arguments + text)
    return answer


PLAIN = Reading()
"""The output is text."""
