"""The parser of tool calls under the name that older pages import it by."""

from sglang.srt.function_call.function_call_parser import FunctionCallParser

__all__ = ["FunctionCallParser"]
