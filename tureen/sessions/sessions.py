"""Keeps sessions, as SGLang's /open_session opens them, and lets requests continue them."""

from __future__ import annotations

import copy
import math
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from tureen.config import Config
from tureen.errors import InvalidRequest, NotFound, TooManyRequests, Unavailable, echo
from tureen.sessions.tree import (
    Keeper,
    Session,
    SessionParams,
    SessionRequest,
    ancestry,
    base_of,
    below,
    path_to,
)
from tureen.text.tokenizer import Tokenizer

MAX_REQUESTS = 1024
"""Maximum number of requests in one session."""

MAX_TOKENS = 1 << 25
"""Maximum number of tokens in all sessions, at 4 bytes each."""

CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that continue a character."""


class Turn:
    """A request that is about to continue a session. `token_ids` is its whole prompt, of which the first `base` are its
    parent's tokens."""

    def __init__(
        self, sessions: Sessions, session: Session, params: SessionParams, parent: SessionRequest | None
    ) -> None:
        self.session = session
        self.params = params
        self.parent = parent
        self.base = base_of(parent, params) if parent is not None else 0
        self.token_ids = path_to(parent, self.base)
        self.chars_before = 0
        self.changes: tuple[str, ...] = ()  # parts that have changed since the request that it continues
        self._sessions = sessions
        self._node: SessionRequest | None = None

    def branches(self, count: int) -> list[Turn]:
        """Returns a turn for each of `count` samples of this prompt, this turn first. They become siblings, and the
        first replaces what the prompt replaces."""
        others = []
        for _ in range(count - 1):
            other = copy.copy(self)
            other.params = msgspec.structs.replace(self.params, replace=False)
            others.append(other)
        return [self, *others]

    def begin(
        self, rid: str, request_id: str, output_ids: list[int], also: Sequence[str] = (), *, adapter: str = ""
    ) -> None:
        """Adds the request to its session just before it runs, and removes the requests that it replaces.

        `rid`: its name in the session; `request_id`: its id in the engine; `output_ids`: the list to which its output
        is appended; `also`: names of further samples of its prompt, which begin after it; `adapter`: its LoRA adapter.

        Raises InvalidRequest if the session has one of these names or is full, NotFound if it was closed meanwhile,
        TooManyRequests or Unavailable if sessions have too many tokens.
        """
        self._node = self._sessions.add(self, rid, request_id, output_ids, also)
        if self.session.keeper is not None:
            self.changes = self.session.keeper.begin(self._node, adapter)

    def end(self, output_ids: list[int] | None) -> None:
        """Stores the output of an ended request. None = it failed or its client left, so removes it."""
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
        self.timeout_s = config.session_timeout_s
        self._abort = abort
        self._clock = clock
        self._added_bos = _added_bos(tokenizer)
        self.keeper: Keeper | None = None  # None: sessions cannot be durable
        self._open: dict[tuple[str, str], Session] = {}  # by owner and name
        self._num_tokens: Counter[str] = Counter()  # by owner; holds no zeros

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Tokens that all sessions hold."""
        return self._num_tokens.total()

    @property
    def now_s(self) -> float:
        """The time of the clock by which sessions expire."""
        return self._clock()

    def num_held_by(self, owner: str) -> int:
        """Returns the number of tokens in a client's sessions."""
        return self._num_tokens[owner]

    def open(
        self,
        capacity: int,
        *,
        owner: str,
        name: str | None = None,
        timeout_s: float | None = None,
        keeper: Keeper | None = None,
    ) -> str:
        """Opens a session whose requests may have prompts of `capacity` characters; returns its name. `keeper`: makes
        it durable.

        Raises InvalidRequest, TooManyRequests if the owner has too many sessions, Unavailable if the server has.
        """
        timeout_s = _timeout_of(self, timeout_s, keeper)
        session = self.enter(Session(name or "", owner, capacity, timeout_s, self._clock()))
        if keeper is not None:
            keeper.keep(session)
        return session.name

    def enter(self, session: Session) -> Session:
        """Adds a session with its requests, and names it if it has no name. Raises as `open`."""
        self.sweep()
        owner = session.owner
        name = session.name = session.name or secrets.token_hex(16)
        if (owner, name) in self._open:
            raise InvalidRequest(
                "Failed to open the session. Check if a session with the same id is still open.",
                field="session_id",
                code="duplicate_session_id",
            )
        self._check_room("open sessions", Counter(holder for holder, _ in self._open), self._max_sessions, owner)
        if session.nodes:
            more = Counter({owner: sum(node.num_held for node in session.nodes.values()) - 1})
            self._check_room("tokens in sessions", self._num_tokens + more, MAX_TOKENS, owner)
        self.restore(session)
        return session

    def restore(self, session: Session) -> None:
        """Adds a session with its requests, under an unused name, without checking limits."""
        self._open[session.owner, session.name] = session
        self._count(session.owner, sum(node.num_held for node in session.nodes.values()))

    def of(self, owner: str) -> list[Session]:
        """Returns a client's sessions, the oldest first."""
        self.sweep()
        return [session for session in self._open.values() if session.owner == owner]

    async def saved(self, *sessions: Session) -> None:
        """Wait until the durable ones of these sessions are on the disk. Raises TureenError."""
        if self.keeper is not None and any(session.keeper is not None for session in sessions):
            await self.keeper.flush()

    def close(self, name: str, *, owner: str) -> Session:
        """Remove a session and return it. Its running requests continue, but are not stored. Raises NotFound."""
        self._forget(session := self.find(owner, name))
        return session

    def sweep(self) -> None:
        """Closes the sessions that were not used for their timeout."""
        now_s = self._clock()
        for session in [session for session in self._open.values() if session.is_expired(now_s)]:
            self._forget(session)

    def extend(self, params: SessionParams, new_ids: list[int], *, owner: str) -> Turn:
        """Prepares the request that continues a session with `new_ids`. Changes nothing before `Turn.begin`.

        Raises NotFound for a session that the owner does not have, and InvalidRequest.
        """
        session = self.find(owner, params.id, "session_params.id")
        if session.keeper is not None:
            session.keeper.check(session)
        turn = Turn(self, session, params, session.parent(params))
        if turn.base and new_ids and new_ids[0] == self._added_bos:
            new_ids = new_ids[1:]
        turn.token_ids += new_ids
        turn.chars_before = _num_chars_before(self._tokenizer, turn)
        if not turn.token_ids:
            raise InvalidRequest(
                "the prompt is empty: input_ids is empty and session_params continues no request",
                field="input_ids",
                code="empty_prompt",
            )
        num_chars = turn.chars_before + _num_chars(self._tokenizer, new_ids)
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
        """Adds a request to its session for `Turn.begin`. Checks everything before it changes anything."""
        session, params = turn.session, turn.params
        if self.find(session.owner, session.name, "session_params.id") is not session:
            raise _no_session(session.name, "session_params.id")
        if session.parent(params) is not turn.parent:
            raise InvalidRequest(
                f"session_params.rid: request {echo(params.rid)} was replaced by another request of that name",
                field="session_params.rid",
            )
        replaced = below(session, turn.parent) if params.replace else {}
        self._check_names(session, (rid, *also), replaced)
        freed = Counter({session.owner: sum(node.num_held for node in replaced.values())})
        self._check_room("tokens in sessions", self._num_tokens - freed, MAX_TOKENS, session.owner)
        if session.keeper is not None:
            session.keeper.check_room(session.owner, len(turn.token_ids) - turn.base - freed[session.owner])
        if params.replace and turn.parent is not None and turn.parent.is_running:
            self._abort(turn.parent.request_id)
            self._set_output(session, turn.parent, turn.parent.output_ids)
        for node in replaced.values():
            if node.is_running:
                self._abort(node.request_id)
            self._remove(session, node)
        new_ids = array("i", turn.token_ids[turn.base :])
        node = SessionRequest(rid, turn.parent, turn.base, new_ids, output_ids, turn.chars_before, request_id)
        session.nodes[rid] = node
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

    def find(self, owner: str, name: str, field: str = "session_id") -> Session:
        """Returns a client's session. Raises NotFound."""
        session = self._open.get((owner, name))
        if session is not None and session.is_expired(self._clock()):
            self._forget(session)
            session = None
        if session is None:
            raise _no_session(name, field)
        return session

    def _forget(self, session: Session) -> None:
        if session.keeper is not None:
            session.keeper.drop(session)
        self._count(session.owner, -sum(node.num_held for node in session.nodes.values()))
        session.nodes.clear()
        del self._open[session.owner, session.name]

    def _remove(self, session: Session, node: SessionRequest) -> None:
        if session.keeper is not None:
            session.keeper.drop(session, node)
        self._count(session.owner, -node.num_held)
        del session.nodes[node.rid]

    def _set_output(self, session: Session, node: SessionRequest, output_ids: Sequence[int]) -> None:
        before = node.num_held
        node.output_ids = array("i", output_ids)
        node.is_running = False
        self._count(session.owner, node.num_held - before)
        if session.keeper is not None:
            session.keeper.put(session, node)

    def _count(self, owner: str, change: int) -> None:
        self._num_tokens[owner] += change
        if not self._num_tokens[owner]:
            del self._num_tokens[owner]

    def _check_names(self, session: Session, rids: Sequence[str], replaced: dict[str, SessionRequest]) -> None:
        for rid in rids:
            if rid in session.nodes and rid not in replaced:
                raise InvalidRequest(
                    f"rid {echo(rid)} is another request of session {echo(session.name)}; "
                    "choose another or leave it out",
                    field="rid",
                    code="duplicate_rid",
                )
        num_held = len(session.nodes) - len(replaced)
        if num_held + len(rids) > MAX_REQUESTS:
            raise InvalidRequest(
                f"session {echo(session.name)} has {num_held} requests, the limit is {MAX_REQUESTS}; "
                "send session_params with replace: true, or open another session",
                field="session_params",
                code="session_full",
            )

    def _check_room(self, resource: str, held: Counter[str], limit: int, owner: str) -> None:
        """Raises Unavailable if the server has `limit` of something, TooManyRequests if a named client has half of
        it."""
        share = max(1, limit // 2)
        if owner and held[owner] >= share:
            raise TooManyRequests(
                f"this client has {held[owner]} {resource}, the limit is {share}; close a session",
                code="too_many_sessions",
                retry_after_s=self._first_expiry_s(owner),
            )
        if held.total() >= limit:
            raise Unavailable(
                f"the server has {held.total()} {resource}, the limit is {limit}; close a session",
                code="too_many_sessions",
                retry_after_s=self._first_expiry_s(None),
            )

    def _first_expiry_s(self, owner: str | None) -> int:
        """Returns the seconds until a session can expire: of this owner, None = of any."""
        ends = [session.used_s + session.timeout_s for session in self._open.values() if owner in (None, session.owner)]
        return max(1, math.ceil(min(ends) - self._clock()))


def _timeout_of(sessions: Sessions, timeout_s: float | None, keeper: Keeper | None) -> float:
    """Returns the timeout of a session that `keeper` keeps. Raises InvalidRequest."""
    most, flag = sessions.timeout_s, "--session-timeout-s"
    if keeper is not None:
        most, flag = keeper.max_timeout_s, "--sessions-ttl"
    if timeout_s is not None and timeout_s > most:
        raise InvalidRequest(f"timeout must be at most {most:g} seconds ({flag}), got {timeout_s:g}", field="timeout")
    return timeout_s or most


def save(sessions: Sessions, name: str, keeper: Keeper, *, owner: str, timeout_s: float | None = None) -> None:
    """Makes a session durable. Raises NotFound, InvalidRequest, TooManyRequests."""
    session = sessions.find(owner, name)
    timeout_s = _timeout_of(sessions, timeout_s, keeper)
    if session.keeper is None:
        keeper.check_room(owner, sum(node.num_held for node in session.nodes.values()))
        keeper.keep(session)
    session.timeout_s, session.used_s = timeout_s, sessions.now_s
    keeper.touch(session)


def unsave(sessions: Sessions, session: Session, timeout_s: float) -> None:
    """Make an open session temporary again, with its earlier timeout, because it could not be saved."""
    if session.keeper is not None and session in sessions.of(session.owner):
        session.keeper.drop(session)
        session.keeper, session.timeout_s = None, timeout_s


def fork(
    sessions: Sessions,
    name: str,
    *,
    owner: str,
    new_name: str | None = None,
    rid: str | None = None,
    timeout_s: float | None = None,
    keeper: Keeper | None = None,
) -> str:
    """Copies a session's ended requests, or `rid` and its ancestors, to a new session; returns its name. `keeper`:
    makes the copy durable. Raises NotFound, Conflict, and as `open`."""
    source = sessions.find(owner, name)
    if source.keeper is not None:
        source.keeper.check(source)
    timeout_s = _timeout_of(sessions, timeout_s, keeper)
    copied = Session(new_name or "", owner, source.capacity, timeout_s, sessions.now_s)
    parent = source.parent(SessionParams(id=name, rid=rid))
    for node in source.nodes.values() if parent is None else ancestry(parent):
        if not node.is_running:
            copied.nodes[node.rid] = node.copy(None if node.parent is None else copied.nodes[node.parent.rid])
    if keeper is not None:
        keeper.check_room(owner, sum(node.num_held for node in copied.nodes.values()))
    sessions.enter(copied)
    if keeper is not None:
        keeper.keep(copied, source)
    return copied.name


def _num_chars_before(tokenizer: Tokenizer, turn: Turn) -> int:
    """Returns the number of characters of the tokens that a turn continues."""
    node, count = turn.parent, turn.base
    while node is not None and count <= node.base:
        node = node.parent
    return 0 if node is None else node.chars_before + _num_chars(tokenizer, node.own(count))


def _num_chars(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns the number of characters that begin in these tokens; special tokens have none, as in an answer's text."""
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_ids)
    return len(text.translate(None, CONTINUATION_BYTES))


def _added_bos(tokenizer: Tokenizer) -> int | None:
    """Returns the token that the tokenizer puts before every text, or None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _no_session(name: str, field: str) -> NotFound:
    return NotFound(
        f"Invalid request: session id {echo(name)} does not exist; it was never opened, was closed, or timed out",
        field=field,
        code="session_not_found",
    )
