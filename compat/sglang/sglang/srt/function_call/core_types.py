"""A call that a parser found."""

from __future__ import annotations

import msgspec


class ToolCallItem(msgspec.Struct, kw_only=True):
    """A call, or a piece of one: `tool_index` counts the calls of a stream, else it is the function's place."""

    tool_index: int
    name: str | None = None
    parameters: str = ""
