"""Applies deadlines and aborts to a request while its pictures are loaded, before the engine has it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from tureen.errors import RequestFailed, Unavailable
from tureen.requests.state import ServerState


@contextlib.asynccontextmanager
async def loading(
    state: ServerState, owner: str, names: Mapping[str, tuple[int, ...]], limits_ms: Mapping[str, int | None]
) -> AsyncIterator[None]:
    """Ends the block at the first of the deadlines, or when the client aborts one of `names`.

    `names`: name -> indices of its requests; `limits_ms`: field -> milliseconds from now, None = no limit. Raises
    InvalidRequest when a name is in use, Unavailable at a deadline or a shutdown, RequestFailed when aborted.
    """
    field, limit_ms = min(
        ((name, value) for name, value in limits_ms.items() if value is not None),
        key=lambda limit: limit[1],
        default=("", None),
    )
    reasons: list[str] = []
    try:
        async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000) as until:

            def abort(reason: str) -> None:
                if not until.expired():
                    reasons.append(reason)
                    until.reschedule(0)

            with state.loading(owner, names, abort):
                yield
    except TimeoutError:
        if not reasons:
            raise Unavailable(
                f"{field} cannot be met: the pictures were not loaded within {limit_ms} ms; try again later",
                field=field,
                code="deadline_unreachable",
            ) from None
        if "shutdown" in reasons:
            raise Unavailable("the server was shut down before the request ended", code="draining") from None
        raise RequestFailed("the request was aborted while its pictures were loaded", code="aborted") from None
