"""Declares what the page of models says of a family."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A family of published models. Only tools/models_page.py reads it."""

    example: str  # a small one, on the hub
    sizes: str  # in weights, the smallest first; after -A those that a token uses
    calls: str = ""  # the format of its tool calls, by a name for --tool-call-parser
    thoughts: str = ""  # the marks of its reasoning, by a name for --reasoning-parser
    is_blind: bool = False  # takes text only, though others of its file take pictures
