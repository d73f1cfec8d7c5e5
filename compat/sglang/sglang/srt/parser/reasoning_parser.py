"""The parser of reasoning, over tureen's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text import reasoning
from tureen.text.messages import Content, Reasoning
from tureen.text.reasoning import FORMATS, find_reasoning_format
from tureen.text.tools import PARSERS


class ReasoningParser:
    """Separates a model's reasoning from its answer. Raises ValueError for a format that tureen does not have."""

    DetectorMap = FORMATS

    def __init__(self, model_type: str, stream_reasoning: bool = True) -> None:
        form = find_reasoning_format(model_type)
        if form is None:
            raise ValueError(f"model_type must be one of {', '.join(FORMATS)}, got {model_type!r}")
        self._form = form
        self._stream = self._reading()

    def _reading(self) -> Any:
        return PARSERS[self._form.calls].parser(()) if self._form.calls else reasoning.ReasoningParser(self._form)

    def parse_non_stream(self, full_text: str) -> tuple[str, str]:
        """Return the reasoning and the answer."""
        reading = self._reading()
        return _texts(reading.feed(full_text) + reading.close())

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, str]:
        """Return what this piece of the output adds to the reasoning and to the answer."""
        return _texts(self._stream.feed(chunk_text))


def _texts(parts: Sequence[Any]) -> tuple[str, str]:
    thoughts, answers = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content)
    )
    return thoughts, answers
