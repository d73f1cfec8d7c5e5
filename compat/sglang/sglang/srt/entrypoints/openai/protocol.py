"""`Tool` and `Function`, as the pages make them."""

from __future__ import annotations

from typing import Any

import msgspec


class Function(msgspec.Struct, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(msgspec.Struct, kw_only=True):
    """A tool that a model may call."""

    function: Function
    type: str = "function"
