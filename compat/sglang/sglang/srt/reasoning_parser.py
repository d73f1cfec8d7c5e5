"""The parser of reasoning under the name that older pages import it by."""

from sglang.srt.parser.reasoning_parser import ReasoningParser

__all__ = ["ReasoningParser"]
