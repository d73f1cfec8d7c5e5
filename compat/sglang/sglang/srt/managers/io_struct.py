"""`Tool` and `Function` under the name that older pages import them by."""

from sglang.srt.entrypoints.openai.protocol import Function, Tool

__all__ = ["Function", "Tool"]
