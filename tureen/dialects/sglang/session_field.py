"""Reads `session_params` of `/generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tureen.errors import InvalidRequest, echo
from tureen.requests.body import convert, refuse_unknown
from tureen.requests.planning import Names
from tureen.requests.sessions import SessionParams


def read_sessions(sent: list[dict[str, Any] | None], *, is_list: bool) -> list[SessionParams | None]:
    """Returns the session that each prompt continues, None = none. Raises InvalidRequest.

    `sent`: session_params of each prompt; `is_list`: the body has a list of them.
    """
    sessions: list[SessionParams | None] = []
    for index, params in enumerate(sent):
        if params is None:
            sessions.append(None)
            continue
        where = f"session_params[{index}]" if is_list else "session_params"
        refuse_unknown(params, SessionParams.__struct_fields__, where)
        fields = {name: value for name, value in params.items() if value is not None}
        sessions.append(convert(fields, SessionParams, Names(where).path))
    _check_replacing([session for session in sessions if session is not None])
    return sessions


def _check_replacing(params: Sequence[SessionParams]) -> None:
    """Raises InvalidRequest when requests of one body would replace each other."""
    counts = Counter(session.id for session in params)
    for session in params:
        if session.replace and counts[session.id] > 1:
            raise InvalidRequest(
                f"session_params has replace: true, and {counts[session.id]} prompts of the batch are of session "
                f"{echo(session.id)}; send them one after the other",
                field="session_params.replace",
            )
