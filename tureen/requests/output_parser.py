"""Parses a growing output: splits its text into content, reasoning and tool calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tureen.contract.types import FinishReason
from tureen.grammar.base import GrammarSpec
from tureen.text.free_input import FreeInputs
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning, Tool
from tureen.text.reasoning import ReasoningFormat, ReasoningParser
from tureen.text.tokenizer import Tokenizer
from tureen.text.tools import ToolFormat, ToolParser


class ReadableOutput(Protocol):
    """The attributes of an output that reading needs, each up to the current token."""

    text: str
    token_ids: list[int]
    finish: FinishReason | None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The rules that split outputs into content, reasoning and tool calls. With the defaults, all text is content."""

    tools: tuple[Tool, ...] = ()  # tools that the model may call
    tool_format: ToolFormat | None = None
    parallel: bool = True  # the model may call several tools in one answer
    reasoning: ReasoningFormat | None = None
    separate_reasoning: bool = True  # else reasoning stays in the content, between its marks
    starts_inside: bool = False  # the prompt ends within the reasoning
    num_neutralised: int = 0  # control tokens spelled in messages, which were tokenized as plain text
    answer: GrammarSpec | None = None  # of an output that may be calls or an answer: the answer's constraint

    def judge(self, spec: GrammarSpec, output: ReadableOutput) -> GrammarSpec:
        """Returns the constraint of the final check of an output: `spec`, or that of an answer without calls."""
        if self.answer is None:
            return spec
        reader = self.reader()
        reader.catch_up(output)
        return spec if reader.has_calls else msgspec.structs.replace(self.answer, after=spec.after)

    @property
    def notes(self) -> dict[str, str]:
        """Notes for the `metadata` of OpenAI's answers."""
        return {"neutralised_special_tokens": str(self.num_neutralised)} if self.num_neutralised else {}

    @property
    def custom_tools(self) -> frozenset[str]:
        """Returns the names of the tools whose input is a text."""
        return frozenset(tool.name for tool in self.tools if tool.free_input is not None)

    def reader(self) -> OutputReader:
        """Makes the reader of one output."""
        reasoning, form = None, self.tool_format
        calls_find_it = self.reasoning is not None and form is not None and self.reasoning.calls in form.NAMES
        if self.reasoning is not None and not calls_find_it and (self.separate_reasoning or form is not None):
            reasoning = ReasoningParser(self.reasoning, starts_inside=self.starts_inside)
        calls = form.parser(self.tools, parallel=self.parallel) if form is not None else None
        if calls is not None and calls_find_it and self.reasoning is not None and self.starts_inside:
            calls.feed(self.reasoning.begin)  # the prompt has it
        marks = None if self.separate_reasoning else self.reasoning
        return OutputReader(reasoning, calls, marks, FreeInputs(self.tools))

    def num_reasoning_tokens(self, output: ReadableOutput, answer: WholeAnswer, tokenizer: Tokenizer) -> int:
        """Returns the number of reasoning tokens in a finished output, including its end mark."""
        if self.reasoning is None or not self.separate_reasoning or not answer.reasoning:
            return 0
        end, token_ids = self.reasoning.end, output.token_ids

        def has_ended(count: int) -> bool:
            return end in tokenizer.decode(token_ids[:count], skip_special_tokens=False)

        return min(bisect_left(range(1, len(token_ids) + 1), True, key=has_ended) + 1, len(token_ids))


class OutputReader:
    """Splits one output into parts as it grows."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        marks: ReasoningFormat | None,
        inputs: FreeInputs,
    ) -> None:
        """`marks`: marks of reasoning that stays in the content; None = reasoning is separate."""
        self._inputs = inputs
        self.has_calls = False
        self._reasoning = reasoning
        self._tools = tools
        self._marks = marks
        self._is_thinking = False
        self._num_chars = 0

    def catch_up(self, output: ReadableOutput) -> list[Part]:
        """Returns the new parts since the last call. At the finish, includes text that was held back."""
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
        """Returns the parts with reasoning turned into content between its marks."""
        content: list[Part] = []
        for part in parts:
            is_thought = isinstance(part, Reasoning)
            if is_thought != self._is_thinking:
                content.append(Content(f"{marks.begin}\n" if is_thought else f"\n{marks.end}\n\n"))
                self._is_thinking = is_thought
            content.append(Content(part.text) if isinstance(part, Reasoning) else part)
        return content

    def _find_calls(self, parser: ToolParser, parts: Sequence[Part], *, has_ended: bool) -> list[Part]:
        read_parts: list[Part] = []
        for part in parts:
            read_parts += parser.feed(part.text) if isinstance(part, Content) else [part]
        return read_parts + (parser.close() if has_ended else [])

    def finish_reason(self, output: ReadableOutput) -> str | None:
        """Returns OpenAI's finish reason: stop, length, tool_calls or abort; None while the output continues."""
        if output.finish is None:
            return None
        name = output.finish.openai_name
        return "tool_calls" if name == "stop" and self.has_calls else name


class WholeAnswer(msgspec.Struct):
    """A finished output's content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []  # name, and arguments as JSON text; of a custom tool its text


def join_parts(parts: Sequence[Part]) -> WholeAnswer:
    """Joins all parts of a finished output."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
    return WholeAnswer("".join(content), "".join(reasoning), [(name, "".join(pieces)) for name, pieces in calls])


PLAIN = Reading()
"""Reading of completions: the whole output is content."""
