"""Sessions: trees of requests whose prompts continue each other, kept by the server."""

from __future__ import annotations

import msgspec


class SessionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which session a prompt continues, and where."""

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class Turn:
    """One request of a session. `token_ids` is its whole prompt."""

    token_ids: list[int]

    def begin(self, rid: str) -> None:
        """The request is about to run under this id. Raises InvalidRequest when the session has one of that name."""
        raise NotImplementedError

    def end(self, output_ids: list[int] | None) -> None:
        """The request has ended with this output; None = it failed or was left, and leaves nothing behind."""
        raise NotImplementedError


class Sessions:
    """All open sessions of a server. Event-loop thread only."""

    def extend(self, params: SessionParams, new_ids: list[int], *, owner: str) -> Turn:
        raise NotImplementedError
