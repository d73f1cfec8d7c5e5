"""Routes that open and close sessions."""

from __future__ import annotations

from tureen.api.dialect import Entry
from tureen.api.state import ServerState


def routes(state: ServerState) -> list[Entry]:
    return []
