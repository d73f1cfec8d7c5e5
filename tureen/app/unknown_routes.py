"""Answers requests for unknown routes: what the client may mean, why it is not here, what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from tureen.errors import MethodNotAllowed, NotFound, TureenError, UpgradeRefused, echo

VERSION = "/v1"
SEND_WEIGHTS = "send weights to /update_weights_from_safetensors, or broadcast them: docs/training-loops.md"
NOT_HERE = {
    "/responses/compact": "the server does not compact conversations; send truncation: auto, or ask for a summary",
    "/realtime": "the server has no WebSockets or audio; send a request to /v1/responses",
    "/audio": "audio is not supported",
    "/images": "generating pictures is not supported",
    "/videos": "generating videos is not supported",
    "/moderations": "the server does not moderate",
    "/assistants": "use /v1/responses",
    "/threads": "use /v1/conversations and /v1/responses",
    "/vector_stores": "the server does not search files; put their text into a message",
    "/uploads": "send the file to /v1/files in one piece",
    "/fine_tuning": "the server does not train models",
    "/containers": "the server runs no tools",
    "/sleep": "use /release_memory_occupation",
    "/wake_up": "use /resume_memory_occupation",
    "/collective_rpc": "clients run no code in the engine",
    **dict.fromkeys(("/update_weights_from_ipc", "/init_communicator", "/update_named_param"), SEND_WEIGHTS),
    **dict.fromkeys(
        ("/init_weight_transfer", "/areal_update_weights", "/areal_init_weights_update_group"), SEND_WEIGHTS
    ),
}
"""Routes of other servers that are not supported, with all paths below them -> the reason, and what to use instead."""

NEAR = 0.8
"""Minimum similarity of two paths (difflib) at which one is suggested for the other."""

MAX_CHARS = 100  # of a path that is compared with known ones


def unknown_route(method: str, path: str, routes: Iterable[BaseRoute]) -> NotFound:
    """Return the error for a path that no route has, with a hint."""
    shown, plain = path[:MAX_CHARS], path.removeprefix(VERSION)
    why = next((why for begin, why in NOT_HERE.items() if f"{plain}/".startswith(f"{begin}/")), "")
    if not why:
        known = sorted({route.path for route in routes if isinstance(route, Route) and method in (route.methods or ())})
        near = difflib.get_close_matches(shown, known, n=1, cutoff=NEAR)
        why = f"did you mean {near[0]}?" if near else ""
    return NotFound(f"there is no route {echo(path)}" + (f"; {why}" if why else ""), code="unknown_route")


def error_for(scope: Scope, routes: list[BaseRoute], status: int) -> TureenError:
    """Return the error for a request that no route accepts. `status`: 404, or 405 if a route has this path.

    A POST below a collection, such as `/v1/responses/compact`, is treated as an unknown route, although a route with an
    id in its path matches it.
    """
    method, path = scope["method"], scope["path"]
    if (b"upgrade", b"websocket") in [(name, value.lower()) for name, value in scope["headers"]]:
        return UpgradeRefused(
            "this server has no WebSockets; send the request as an HTTP POST, with stream: true for a stream of events"
        )
    matching = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    if status == 405 and (method != "POST" or not all(route.path.endswith("}") for route in matching)):
        allowed = ", ".join(sorted({name for route in matching for name in route.methods or ()}))
        return MethodNotAllowed(f"this path does not take {method}; use {allowed}", allowed=allowed)
    return unknown_route(method, path, routes)
