"""Stub."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from tureen.api.dialect import Entry
from tureen.api.state import ServerState
from tureen.errors import InvalidRequest


def routes(state: ServerState) -> list[Entry]:
    return []


async def respond(given: dict[str, Any], request: Request, state: ServerState) -> ASGIApp:
    raise InvalidRequest("not yet")
