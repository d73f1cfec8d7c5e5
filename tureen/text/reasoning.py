"""Separates a model's reasoning from its answer by the marks around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tureen.errors import StartupError, echo
from tureen.text.marks import overlap
from tureen.text.messages import Content, Part, Reasoning

LINE_BREAKS = "\r\n"
"""Line breaks next to a mark are dropped with it: templates put marks on lines of their own."""


class ReasoningFormat(NamedTuple):
    """The marks around a model's reasoning."""

    begin: str
    end: str
    starts_inside: bool  # the output begins with reasoning even without the opening mark
    is_special: bool = False  # the marks are special tokens: they must stay in the text
    calls: str = ""  # the tool-call format whose parser also extracts the reasoning
    answer: str = ""  # the mark between the end and an answer
    answer_end: str = ""  # the mark after an answer, if its marks are not part of its text


_MAY_THINK = ReasoningFormat("<think>", "</think>", starts_inside=False)
_THINKS = ReasoningFormat("<think>", "</think>", starts_inside=True)
_HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    starts_inside=False,
    is_special=True,
    calls="gpt-oss",
    answer="<|channel|>final<|message|>",
)
_COHERE = ReasoningFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    starts_inside=False,
    is_special=True,
    answer="<|START_RESPONSE|>",
    answer_end="<|END_RESPONSE|>",
)
_HUNYUAN = _MAY_THINK._replace(answer="\n<answer>\n", answer_end="</answer>")

FORMATS: dict[str, ReasoningFormat] = {
    "cohere-command3": _COHERE,
    "cohere-command4": _COHERE._replace(answer="<|START_TEXT|>", answer_end="<|END_TEXT|>"),
    "deepseek-r1": _THINKS,
    "deepseek-v3": _MAY_THINK,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", starts_inside=False, is_special=True),
    "glm45": _MAY_THINK,
    "gpt-oss": _HARMONY,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷", starts_inside=False),
    "hunyuan": _HUNYUAN,
    "hunyuan-a13b": _HUNYUAN,
    "openai-gptoss": _HARMONY,
    "kimi-k2": _MAY_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", starts_inside=False, is_special=True),
    "qwen3": _MAY_THINK,
    "qwen3-thinking": _THINKS,
    "seed-oss": ReasoningFormat("<seed:think>", "</seed:think>", starts_inside=False, is_special=True),
    "step3": _THINKS,
}
"""Formats by the names of SGLang and vLLM; some are written with `_` there."""


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """Returns the format of this name, by SGLang's or vLLM's spelling; None = unknown."""
    return FORMATS.get(name.replace("_", "-"))


def reasoning_format(setting: str, template: str) -> ReasoningFormat | None:
    """Returns the format that --reasoning-parser selects: by name, none, or with auto the one whose marks are in the
    chat template.

    With auto `starts_inside` is false; the end of each prompt tells whether its output begins with reasoning. Raises
    StartupError naming the known formats.
    """
    if setting == "none":
        return None
    if setting == "auto":
        formats = dict.fromkeys(form._replace(starts_inside=False) for form in FORMATS.values())
        marked = [form for form in formats if form.begin in template or form.end in template]
        return next((form for form in marked if form.answer_end and form.answer_end in template), None) or next(
            (form for form in marked if not form.answer_end), None
        )
    form = find_reasoning_format(setting)
    if form is None:
        raise StartupError(
            f"--reasoning-parser {echo(setting)}: there is no such parser; use auto, none, {', '.join(FORMATS)}",
            field="reasoning_parser",
        )
    return form


class ReasoningParser:
    """Splits a text that comes in pieces into Reasoning and Content.

    Reasoning is the text between the marks, if the text begins with the opening mark or `starts_inside`. The marks,
    those of the answer too, and the line breaks around them are dropped; every other character is returned once, in
    order, as soon as it cannot belong to a mark.
    """

    def __init__(self, form: ReasoningFormat, *, starts_inside: bool | None = None) -> None:
        self._form = form
        self._answer_mark = form.answer.strip(LINE_BREAKS) if form.answer_end else ""
        self._starts_inside = form.starts_inside if starts_inside is None else starts_inside
        self._read: Callable[[bool], list[Part]] = self._beginning
        self._rest = ""  # text that may begin a mark
        self._space: list[str] = []  # white space held back, as a mark may follow

    def feed(self, text: str) -> list[Part]:
        """Reads a piece of text and returns the parts that are certain now."""
        self._rest += text
        return self._parts(is_end=False)

    def close(self) -> list[Part]:
        """Returns the rest. Line breaks at the end of unfinished reasoning are dropped too."""
        return self._parts(is_end=True)

    def _parts(self, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        reads = None
        while reads != self._read and (self._rest or is_end):
            reads = self._read
            parts += reads(is_end)
        return parts

    def _beginning(self, is_end: bool) -> list[Part]:
        text = self._rest.lstrip()
        self._space.append(self._rest[: len(self._rest) - len(text)])
        self._rest = text
        if text.startswith(self._form.begin):
            self._rest = text[len(self._form.begin) :]
            self._space.clear()
            self._read = self._opened
        elif self._answer_mark and text.startswith(self._answer_mark):
            self._space.clear()
            self._read = self._closed
        elif is_end or not (self._form.begin.startswith(text) or self._answer_mark.startswith(text)):
            self._rest = "".join((*self._space, text))
            self._space.clear()
            self._read = self._opened if self._starts_inside else self._answer
        return []

    def _opened(self, _: bool) -> list[Part]:
        self._rest = self._rest.lstrip(LINE_BREAKS)
        if self._rest:
            self._read = self._reasoning
        return []

    def _reasoning(self, is_end: bool) -> list[Part]:
        return self._marked(Reasoning, self._form.end, is_end)

    def _marked(self, kind: type[Reasoning | Content], end: str, is_end: bool) -> list[Part]:
        """Reads text up to the mark at its end, and holds back the line breaks before it."""
        text, mark, rest = self._rest.partition(end)
        if mark:
            self._rest, self._read = rest, self._closed
            parts = self._shown(kind, text)
            self._space.clear()
            return parts
        held = 0 if is_end else overlap(text, end)
        self._rest = text[len(text) - held :]
        return self._shown(kind, text[: len(text) - held])

    def _shown(self, kind: type[Reasoning | Content], text: str) -> list[Part]:
        """Returns a piece of text, and holds back the line breaks at its end."""
        shown = text.rstrip(LINE_BREAKS)
        breaks = text[len(shown) :]
        if not shown:
            self._space.append(breaks)
            return []
        whole = "".join((*self._space, shown))
        self._space = [breaks]
        return [kind(whole)]

    def _closed(self, is_end: bool) -> list[Part]:
        self._rest = self._rest.lstrip(LINE_BREAKS)
        if self._answer_mark and self._rest.startswith(self._answer_mark):
            self._rest = self._rest[len(self._answer_mark) :]
            self._read = self._marked_answer_begun
        elif self._rest and (is_end or not self._answer_mark.startswith(self._rest)):
            self._read = self._answer
        return []

    def _marked_answer_begun(self, _: bool) -> list[Part]:
        self._rest = self._rest.lstrip(LINE_BREAKS)
        if self._rest:
            self._read = self._marked_answer
        return []

    def _marked_answer(self, is_end: bool) -> list[Part]:
        return self._marked(Content, self._form.answer_end, is_end)

    def _answer(self, _: bool) -> list[Part]:
        text, self._rest = self._rest, ""
        return [Content(text)] if text else []
