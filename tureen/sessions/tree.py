"""Describes a session: a tree of requests, each of which continues another, stored as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tureen.errors import InvalidRequest, echo


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The session that a prompt continues, and the position in it."""

    id: Annotated[str, Meta(description="The session id that /open_session returned.")]
    rid: Annotated[
        str | None,
        Meta(description="The request to continue: its prompt and output come first. Without it: a new root."),
    ] = None
    offset: Annotated[
        int | None,
        Meta(description="How many tokens of the text to keep; negative counts from the end, 0 = all."),
    ] = None
    replace: Annotated[
        bool, Meta(description="End and remove earlier continuations of rid; without rid, the whole tree.")
    ] = False
    drop_previous_output: Annotated[bool, Meta(description="Continue the prompt of rid without its output.")] = False


class SessionRequest:
    """A request in a session's tree. Its prompt is the first `base` tokens of its parent's prompt and output, followed
    by `new_ids`.

    While it runs, `output_ids` is the list that grows with its output.
    """

    __slots__ = ("base", "chars_before", "is_running", "new_ids", "output_ids", "parent", "request_id", "rid")

    def __init__(
        self,
        rid: str,
        parent: SessionRequest | None,
        base: int,
        new_ids: array[int],
        output_ids: Sequence[int],
        chars_before: int,
        request_id: str | None = None,
    ) -> None:
        """`request_id`: its id in the engine; None = it has ended."""
        self.rid = rid
        self.request_id = request_id or ""
        self.parent = parent
        self.base = base
        self.chars_before = chars_before
        self.new_ids = new_ids
        self.output_ids = output_ids
        self.is_running = request_id is not None

    @property
    def num_prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.base + len(self.new_ids)

    @property
    def num_held(self) -> int:
        """Tokens that are stored for this request and not for its parent."""
        return len(self.new_ids) + (0 if self.is_running else len(self.output_ids))

    def copy(self, parent: SessionRequest | None) -> SessionRequest:
        """Returns a copy of the request that continues `parent`."""
        return SessionRequest(self.rid, parent, self.base, self.new_ids, self.output_ids, self.chars_before)

    def own(self, count: int) -> list[int]:
        """Returns the first `count` tokens of prompt and output, without the parent's."""
        return [*self.new_ids, *self.output_ids][: max(0, count - self.base)]


class Keeper(Protocol):
    """Keeps durable sessions. All reported changes are on the disk when `flush` returns."""

    max_timeout_s: float

    def keep(self, session: Session, source: Session | None = None) -> None:
        """Makes a session durable, with its requests. `source`: the session it was copied from."""

    def touch(self, session: Session) -> None:
        """Called when a session was used, or got another timeout."""

    def put(self, session: Session, node: SessionRequest) -> None:
        """Called when a request has ended."""

    def drop(self, session: Session, node: SessionRequest | None = None) -> None:
        """Called when a request, or the whole session, is removed."""

    def check_room(self, owner: str, num_more: int) -> None:
        """Raises TooManyRequests if these tokens would exceed the limit of a client's durable sessions."""

    def check(self, session: Session) -> None:
        """Raises Conflict for a session with token ids of another tokenizer."""

    def begin(self, node: SessionRequest, adapter: str) -> tuple[str, ...]:
        """Records the parts that compute a request. Returns those that have changed since the request that it
        continues."""

    def report(self, session: Session) -> dict[str, object]:
        """Returns the additional facts of a durable session in a list of sessions."""

    async def flush(self) -> None:
        """Writes all changes to the disk. Raises TureenError."""


class Session:
    """An open session. `nodes` are its requests by name; a parent is before its children."""

    def __init__(self, name: str, owner: str, capacity: int, timeout_s: float, now_s: float) -> None:
        self.keeper: Keeper | None = None  # None: it does not survive a restart
        self.name = name
        self.owner = owner
        self.capacity = capacity  # characters
        self.timeout_s = timeout_s
        self.used_s = now_s
        self.nodes: dict[str, SessionRequest] = {}

    def is_expired(self, now_s: float) -> bool:
        """Returns whether the session was not used for its timeout and has no running request."""
        is_late = now_s - self.used_s >= self.timeout_s
        return is_late and not any(node.is_running for node in self.nodes.values())

    def parent(self, params: SessionParams) -> SessionRequest | None:
        """Returns the request that `params` continues; None = a new root. Raises InvalidRequest."""
        if params.rid is None:
            return None
        node = self.nodes.get(params.rid)
        if node is None:
            raise InvalidRequest(
                f"Invalid request session id: session {echo(self.name)} has no request {echo(params.rid)}; "
                "it never existed, it failed, or another request replaced it",
                field="session_params.rid",
            )
        if node.is_running and not params.replace:
            raise InvalidRequest(
                "Session request is appending to a request that hasn't finished. "
                f"Wait for {echo(params.rid)} to end, or replace it with replace: true",
                field="session_params.rid",
                code="session_request_running",
            )
        return node


def base_of(parent: SessionRequest, params: SessionParams) -> int:
    """Returns the number of the parent's tokens that a request continues: all of them without an offset, or with 0.
    Raises InvalidRequest."""
    length = parent.num_prompt + (0 if params.drop_previous_output else len(parent.output_ids))
    offset = params.offset or 0
    if not -length <= offset <= length:
        extent = "tokens in its prompt" if params.drop_previous_output else "tokens, prompt and output together"
        raise InvalidRequest(
            f"session_params.offset is {echo(offset)}, but request {echo(params.rid)} has {length} {extent}; "
            f"send one in [-{length}, {length}]",
            field="session_params.offset",
        )
    return offset if offset > 0 else length + offset


def path_to(node: SessionRequest | None, count: int) -> list[int]:
    """Returns the first `count` tokens of a request's prompt and output; an empty list for None."""
    parts = []
    while node is not None:
        parts.append(node.own(count))
        count = min(count, node.base)
        node = node.parent
    return [token_id for part in reversed(parts) for token_id in part]


def ancestry(node: SessionRequest) -> list[SessionRequest]:
    """Returns a request and its ancestors, the oldest first."""
    nodes = [node]
    while nodes[-1].parent is not None:
        nodes.append(nodes[-1].parent)
    return nodes[::-1]


def below(session: Session, parent: SessionRequest | None) -> dict[str, SessionRequest]:
    """Returns the descendants of `parent` by name; None = all requests of the session."""
    nodes: dict[str, SessionRequest] = {}
    for rid, node in session.nodes.items():
        if parent is None or node.parent is parent or (node.parent is not None and node.parent.rid in nodes):
            nodes[rid] = node
    return nodes
