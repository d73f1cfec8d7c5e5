"""Keeps sessions, as SGLang's /open_session has them: trees of requests whose prompts continue each other, stored as
token ids."""

from __future__ import annotations

import copy
import math
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tureen.config import Config
from tureen.errors import InvalidRequest, NotFound, TooManyRequests, Unavailable, echo
from tureen.text.tokenizer import Tokenizer

MAX_REQUESTS = 1024
"""Most requests that one session remembers."""

MAX_TOKENS = 1 << 25
"""Most tokens that all sessions hold, at 4 bytes each."""

CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that continue a character."""


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The session that a prompt continues, and where in it."""

    id: Annotated[str, Meta(description="The session, as /open_session answered it.")]
    rid: Annotated[
        str | None,
        Meta(description="The request to continue: its prompt and output come first. Without it: a new root."),
    ] = None
    offset: Annotated[
        int | None,
        Meta(description="Keep only so many tokens of what is continued; negative counts from the end, 0 = all."),
    ] = None
    replace: Annotated[
        bool, Meta(description="End and forget what continues rid already; without rid, the whole tree.")
    ] = False
    drop_previous_output: Annotated[bool, Meta(description="Continue the prompt of rid without its output.")] = False


class SessionRequest:
    """A request in a session's tree. Its prompt is the first `base` tokens of its parent's prompt and output, followed
    by `new_ids`.

    While it runs, `output_ids` is the list that grows with its output.
    """

    __slots__ = ("base", "chars_before", "is_running", "new_ids", "output_ids", "parent", "request_id", "rid")

    def __init__(self, rid: str, request_id: str, output_ids: list[int], turn: Turn) -> None:
        self.rid = rid
        self.request_id = request_id
        self.parent = turn.parent
        self.base = turn.base
        self.chars_before = turn.chars_before
        self.new_ids = array("i", turn.token_ids[turn.base :])
        self.output_ids: Sequence[int] = output_ids
        self.is_running = True

    @property
    def num_prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.base + len(self.new_ids)

    @property
    def num_held(self) -> int:
        """Tokens that are stored for this request and not for its parent."""
        return len(self.new_ids) + (0 if self.is_running else len(self.output_ids))

    def own(self, count: int) -> list[int]:
        """Returns those of the first `count` tokens of prompt and output that are not the parent's."""
        return [*self.new_ids, *self.output_ids][: max(0, count - self.base)]


class Session:
    """An open session. `nodes` are its requests by name; a parent comes before its children."""

    def __init__(self, name: str, owner: str, capacity: int, timeout_s: float, now_s: float) -> None:
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
                "it was never there, it failed, or another one replaced it",
                field="session_params.rid",
            )
        if node.is_running and not params.replace:
            raise InvalidRequest(
                "Session request is appending to a request that hasn't finished. "
                f"Wait for {echo(params.rid)} to end, or end it with replace: true",
                field="session_params.rid",
                code="session_request_running",
            )
        return node


class Turn:
    """A request that is about to continue a session. `token_ids` is its whole prompt, of which the first `base` are its
    parent's tokens."""

    def __init__(
        self, sessions: Sessions, session: Session, params: SessionParams, parent: SessionRequest | None
    ) -> None:
        self.session = session
        self.params = params
        self.parent = parent
        self.base = _base(parent, params) if parent is not None else 0
        self.token_ids = _path(parent, self.base)
        self.chars_before = 0
        self._sessions = sessions
        self._node: SessionRequest | None = None

    def branches(self, count: int) -> list[Turn]:
        """Returns a turn for each of `count` samples of this prompt, itself first: they stand beside each other, and
        what the prompt replaces is replaced by the first."""
        others = []
        for _ in range(count - 1):
            other = copy.copy(self)
            other.params = msgspec.structs.replace(self.params, replace=False)
            others.append(other)
        return [self, *others]

    def begin(self, rid: str, request_id: str, output_ids: list[int], also: Sequence[str] = ()) -> None:
        """Adds the request to its session just before it runs, and removes the requests that it replaces.

        `rid`: its name in the session; `request_id`: its id in the engine; `output_ids`: list that its output will be
        appended to; `also`: names of further samples of its prompt, which begin after it.

        Raises InvalidRequest when the session has one of these names, or as many requests as it may; NotFound when it
        was closed meanwhile; TooManyRequests or Unavailable when sessions hold too many tokens.
        """
        self._node = self._sessions.add(self, rid, request_id, output_ids, also)

    def end(self, output_ids: list[int] | None) -> None:
        """Stores the output of a request that has ended; None = it failed or its client left: it is removed."""
        if self._node is not None:
            self._sessions.end(self.session, self._node, output_ids)


class Sessions:
    """All open sessions of a server. Those of one owner are invisible to all others. Event-loop thread only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Config,
        *,
        abort: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`abort` ends a running request by its id in the engine."""
        self._tokenizer = tokenizer
        self._max_sessions = config.max_sessions
        self._timeout_s = config.session_timeout_s
        self._abort = abort
        self._clock = clock
        self._added_bos = _added_bos(tokenizer)
        self._open: dict[tuple[str, str], Session] = {}  # by owner and name
        self._num_tokens: Counter[str] = Counter()  # by owner; holds no zeros

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens that all sessions hold."""
        return self._num_tokens.total()

    def open(self, capacity: int, *, owner: str, name: str | None = None, timeout_s: float | None = None) -> str:
        """Opens a session whose requests may have prompts of `capacity` characters; returns its name.

        Raises InvalidRequest, TooManyRequests when the owner has too many sessions, Unavailable when the server has.
        """
        if timeout_s is not None and timeout_s > self._timeout_s:
            raise InvalidRequest(
                f"timeout must be at most {self._timeout_s:g} seconds (--session-timeout-s), got {timeout_s:g}",
                field="timeout",
            )
        self.sweep()
        if name is None:
            name = secrets.token_hex(16)
        if (owner, name) in self._open:
            raise InvalidRequest(
                "Failed to open the session. Check if a session with the same id is still open.",
                field="session_id",
                code="duplicate_session_id",
            )
        self._check_room("open sessions", Counter(holder for holder, _ in self._open), self._max_sessions, owner)
        self._open[owner, name] = Session(name, owner, capacity, timeout_s or self._timeout_s, self._clock())
        return name

    def close(self, name: str, *, owner: str) -> None:
        """Forgets a session; its running requests go on, but are not stored. Raises NotFound."""
        self._forget(self._find(owner, name, "session_id"))

    def sweep(self) -> None:
        """Closes the sessions that were not used for their timeout."""
        now_s = self._clock()
        for session in [session for session in self._open.values() if session.is_expired(now_s)]:
            self._forget(session)

    def extend(self, params: SessionParams, new_ids: list[int], *, owner: str) -> Turn:
        """Prepares the request that continues a session with `new_ids`; nothing is changed before `Turn.begin`.

        Raises NotFound for a session that the owner does not have, and InvalidRequest.
        """
        session = self._find(owner, params.id, "session_params.id")
        turn = Turn(self, session, params, session.parent(params))
        if turn.base and new_ids and new_ids[0] == self._added_bos:
            new_ids = new_ids[1:]
        turn.token_ids += new_ids
        turn.chars_before = self._num_chars_before(turn)
        if not turn.token_ids:
            raise InvalidRequest(
                "the prompt is empty: input_ids is, and session_params continues nothing",
                field="input_ids",
                code="empty_prompt",
            )
        num_chars = turn.chars_before + self._num_chars(new_ids)
        if num_chars > session.capacity:
            raise InvalidRequest(
                f"session_params: the prompt would have {num_chars} characters, but session {echo(session.name)} holds "
                f"{session.capacity} (its capacity_of_str_len); continue an earlier request, or open a larger session",
                field="session_params",
                code="session_capacity_exceeded",
            )
        session.used_s = self._clock()
        return turn

    def add(
        self, turn: Turn, rid: str, request_id: str, output_ids: list[int], also: Sequence[str] = ()
    ) -> SessionRequest:
        """Adds a request to its session for `Turn.begin`. Everything is checked before anything is changed."""
        session, params = turn.session, turn.params
        if self._find(session.owner, session.name, "session_params.id") is not session:
            raise _no_session(session.name, "session_params.id")
        if session.parent(params) is not turn.parent:
            raise InvalidRequest(
                f"session_params.rid: request {echo(params.rid)} was replaced by another of that name",
                field="session_params.rid",
            )
        replaced = _below(session, turn.parent) if params.replace else {}
        self._check_names(session, (rid, *also), replaced)
        freed = Counter({session.owner: sum(node.num_held for node in replaced.values())})
        self._check_room("tokens in sessions", self._num_tokens - freed, MAX_TOKENS, session.owner)
        if params.replace and turn.parent is not None and turn.parent.is_running:
            self._abort(turn.parent.request_id)
            self._set_output(session, turn.parent, turn.parent.output_ids)
        for node in replaced.values():
            if node.is_running:
                self._abort(node.request_id)
            self._remove(session, node)
        node = session.nodes[rid] = SessionRequest(rid, request_id, output_ids, turn)
        self._count(session.owner, node.num_held)
        session.used_s = self._clock()
        return node

    def end(self, session: Session, node: SessionRequest, output_ids: list[int] | None) -> None:
        """Stores or removes a request for `Turn.end`."""
        if session.nodes.get(node.rid) is not node:
            return  # closed or replaced meanwhile
        session.used_s = self._clock()
        if output_ids is not None:
            self._set_output(session, node, output_ids)
        elif node.is_running:
            self._remove(session, node)

    def _find(self, owner: str, name: str, field: str) -> Session:
        session = self._open.get((owner, name))
        if session is not None and session.is_expired(self._clock()):
            self._forget(session)
            session = None
        if session is None:
            raise _no_session(name, field)
        return session

    def _forget(self, session: Session) -> None:
        self._count(session.owner, -sum(node.num_held for node in session.nodes.values()))
        session.nodes.clear()
        del self._open[session.owner, session.name]

    def _remove(self, session: Session, node: SessionRequest) -> None:
        self._count(session.owner, -node.num_held)
        del session.nodes[node.rid]

    def _set_output(self, session: Session, node: SessionRequest, output_ids: Sequence[int]) -> None:
        before = node.num_held
        node.output_ids = array("i", output_ids)
        node.is_running = False
        self._count(session.owner, node.num_held - before)

    def _count(self, owner: str, change: int) -> None:
        self._num_tokens[owner] += change
        if not self._num_tokens[owner]:
            del self._num_tokens[owner]

    def _check_names(self, session: Session, rids: Sequence[str], replaced: dict[str, SessionRequest]) -> None:
        for rid in rids:
            if rid in session.nodes and rid not in replaced:
                raise InvalidRequest(
                    f"rid {echo(rid)} is the name of another request of session {echo(session.name)}; "
                    "choose another or leave it out",
                    field="rid",
                    code="duplicate_rid",
                )
        num_held = len(session.nodes) - len(replaced)
        if num_held + len(rids) > MAX_REQUESTS:
            raise InvalidRequest(
                f"session {echo(session.name)} has {num_held} requests, and remembers {MAX_REQUESTS} at most; "
                "send session_params with replace: true, or open another session",
                field="session_params",
                code="session_full",
            )

    def _check_room(self, resource: str, held: Counter[str], limit: int, owner: str) -> None:
        """Raises Unavailable when the server holds `limit` of something, TooManyRequests when a named client holds
        half."""
        share = max(1, limit // 2)
        if owner and held[owner] >= share:
            raise TooManyRequests(
                f"this client has {held[owner]} {resource}, the most it may have is {share}; close a session",
                code="too_many_sessions",
                retry_after_s=self._first_expiry_s(owner),
            )
        if held.total() >= limit:
            raise Unavailable(
                f"the server has {held.total()} {resource}, the most it may have is {limit}; close a session",
                code="too_many_sessions",
                retry_after_s=self._first_expiry_s(None),
            )

    def _first_expiry_s(self, owner: str | None) -> int:
        """Returns the seconds until a session can expire: of this owner, None = of any."""
        ends = [session.used_s + session.timeout_s for session in self._open.values() if owner in (None, session.owner)]
        return max(1, math.ceil(min(ends) - self._clock()))

    def _num_chars_before(self, turn: Turn) -> int:
        """Returns the characters of the tokens that a turn continues."""
        node, count = turn.parent, turn.base
        while node is not None and count <= node.base:
            node = node.parent
        return 0 if node is None else node.chars_before + self._num_chars(node.own(count))

    def _num_chars(self, ids: Sequence[int]) -> int:
        """Returns how many characters begin in these tokens; special tokens have none, as in an answer's text."""
        tokenizer = self._tokenizer
        text = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_ids)
        return len(text.translate(None, CONTINUATION_BYTES))


def _added_bos(tokenizer: Tokenizer) -> int | None:
    """Returns the token that the tokenizer puts before every text; None when it adds none."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _no_session(name: str, field: str) -> NotFound:
    return NotFound(
        f"Invalid request: session id {echo(name)} does not exist; it was never opened, or was closed, "
        "or was not used for its timeout",
        field=field,
        code="session_not_found",
    )


def _base(parent: SessionRequest, params: SessionParams) -> int:
    """Returns how many of the parent's tokens a request continues; without an offset, or with 0, all of them. Raises
    InvalidRequest."""
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


def _path(node: SessionRequest | None, count: int) -> list[int]:
    """Returns the first `count` tokens of a request's prompt and output; none for None."""
    parts = []
    while node is not None:
        parts.append(node.own(count))
        count = min(count, node.base)
        node = node.parent
    return [token_id for part in reversed(parts) for token_id in part]


def _below(session: Session, parent: SessionRequest | None) -> dict[str, SessionRequest]:
    """Returns the requests that continue `parent`, directly or not, by name; None = all of the session."""
    nodes: dict[str, SessionRequest] = {}
    for rid, node in session.nodes.items():
        if parent is None or node.parent is parent or (node.parent is not None and node.parent.rid in nodes):
            nodes[rid] = node
    return nodes
