"""Keeps durable sessions in the file of --sessions-db, and loads those that it contains.

A request is in the file before its client gets its end. Other changes, such as the use, replacement and expiry of
sessions, are written once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tureen.errors import Conflict, StartupError, TooManyRequests, TureenError, echo
from tureen.files import sample_digest
from tureen.requests.state import ServerState
from tureen.sessions.tree import Session, SessionRequest, ancestry
from tureen.storage.sessions import FLAG, RequestRow, SessionFile, SessionRow

INTERVAL_S = 1.0
RETRY_S = 30.0
"""Seconds between two writes, and after a failed one."""

PARTS = ("model", "weights", "dtype", "hardware", "adapter")
"""The kinds of parts that compute a request, in the order in which answers list changed ones."""
ADAPTER = "adapter "
"""Prefix of the name of a part that is a LoRA adapter."""


class KeptFacts(NamedTuple):
    """Facts about a durable session that a Session does not have."""

    number: int
    created_s: float  # seconds since the epoch
    tokenizer: str
    model: str


class Computed(NamedTuple):
    """The number of a request in the file, and the parts that computed it, by name."""

    number: int
    parts: Mapping[str, str]


class ComputingParts:
    """Describes the parts that compute the requests of a server: name -> digest, or words."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._start = self._weights()
        self._loaded = state.adapters
        self._digests: dict[str, str] = {}  # of loaded adapters, by name or path

    def now(self, adapter: str = "") -> dict[str, str]:
        """Returns the parts. `adapter`: name or path of the LoRA adapter; "" = none."""
        info, config = self._state.context.info, self._state.context.config
        weights = self._weights()
        parts = {
            "model": f"{info.architecture} {info.hidden_size} {info.vocab_size}",
            "weights": info.weights if weights == self._start else _short(f"{info.weights} {weights}"),
            "dtype": f"{info.dtype} {info.activations} {config.quantization} {config.kv_cache_dtype}",
            "hardware": f"{info.device} {info.processor}",
        }
        return parts | {ADAPTER + adapter: self._adapter(adapter)} if adapter else parts

    def _weights(self) -> tuple[str, str]:
        """Returns a description of the weights that changes when they are replaced."""
        return self._state.context.info.model_path, self._state.context.config.weight_version

    def _adapter(self, adapter: str) -> str:
        """Returns the digest of a loaded adapter's files."""
        if self._loaded is not self._state.adapters:  # it is another object after each change
            self._loaded, self._digests = self._state.adapters, {}
        if adapter not in self._digests:
            self._digests[adapter] = _folder_digest(self._loaded.get(adapter, adapter))
        return self._digests[adapter]


class SessionKeeper:
    """A service that keeps a server's durable sessions. Event-loop thread only."""

    def __init__(self, state: ServerState, wall: Callable[[], float] = time.time) -> None:
        """`wall`: returns the seconds since the epoch. Raises StartupError."""
        config = state.context.config
        self.max_timeout_s = config.sessions_ttl_s
        self._state = state
        self._wall = wall
        self._tokenizer = _short(state.context.tokenizer.backend.to_str())
        self._parts = ComputingParts(state)
        self._sessions: dict[Session, KeptFacts] = {}
        self._requests: dict[SessionRequest, Computed] = {}
        self._new_sessions: dict[int, SessionRow | None] = {}
        self._new_requests: dict[int, RequestRow | None] = {}
        self._used: set[Session] = set()
        self._turn = asyncio.Lock()  # held during a write
        self._task: asyncio.Task[None] | None = None
        self._is_open = True
        self._file = SessionFile(config.sessions_db or "")
        try:
            self._restore()
        except BaseException:
            self._file.close()
            raise
        state.sessions.keeper = self

    def start(self) -> None:
        """Begins to write."""
        self._task = asyncio.create_task(self._keep())

    def drain(self) -> None:
        """Does nothing, because requests still end."""

    async def close(self) -> None:
        """Writes the remaining changes, and closes the file."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(TureenError):  # the storage has logged it
            await self.flush()
        self._is_open = False
        self._file.close()

    def keep(self, session: Session, source: Session | None = None) -> None:
        """Makes a session durable, with its requests. `source`: the session it was copied from."""
        model = self._state.context.info.model_name
        self._sessions[session] = KeptFacts(next(self._numbers), self._wall(), self._tokenizer, model)
        session.keeper = self
        self._used.add(session)
        for rid, node in session.nodes.items():
            original = None if source is None else self._requests.get(source.nodes[rid])
            parts = self._parts.now() if original is None else original.parts
            self._requests[node] = Computed(next(self._numbers), parts)
            if not node.is_running:
                self.put(session, node)

    def touch(self, session: Session) -> None:
        """Called when a session was used, or got another timeout."""
        self._used.add(session)

    def put(self, session: Session, node: SessionRequest) -> None:
        """Called when a request has ended."""
        maker = self._requests[node]
        parent = None if node.parent is None else self._requests[node.parent].number
        number = self._sessions[session].number
        output_ids = array("i", node.output_ids)
        self._new_requests[maker.number] = RequestRow(
            maker.number, number, node.rid, parent, node.base, node.chars_before, node.new_ids, output_ids, maker.parts
        )
        self._used.add(session)

    def drop(self, session: Session, node: SessionRequest | None = None) -> None:
        """Called when a request, or the whole session, is removed."""
        if node is not None:
            self._new_requests[self._requests.pop(node).number] = None
            return
        for each in session.nodes.values():
            self._new_requests.pop(self._requests.pop(each).number, None)
        self._new_sessions[self._sessions.pop(session).number] = None
        self._used.discard(session)

    def check_room(self, owner: str, num_more: int) -> None:
        """Raises TooManyRequests if these tokens would exceed the limit of a client's durable sessions."""
        most = self._state.context.config.sessions_max_tokens
        if self._state.sessions.num_held_by(owner) + num_more <= most:
            return
        mine = [session for session in self._sessions if session.owner == owner]
        held = sum(node.num_held for session in mine for node in session.nodes.values())
        if held + num_more > most:
            ends = [session.used_s + session.timeout_s - self._state.sessions.now_s for session in mine]
            raise TooManyRequests(
                f"this client's durable sessions hold {held} tokens and this request adds {num_more}; the limit is "
                f"{most} (--sessions-max-tokens); close one of them",
                code="session_quota_exceeded",
                retry_after_s=max(1, round(min(ends, default=1))),
            )

    def check(self, session: Session) -> None:
        """Raises Conflict for a session with token ids of another tokenizer."""
        if self._sessions[session].tokenizer != self._tokenizer:
            raise Conflict(
                f"session {echo(session.name)} was opened with the model {echo(self._sessions[session].model)}, whose "
                "tokenizer differs from this server's: its token ids mean other text here. Start the server with a "
                "model that has that tokenizer, or open another session",
                code="session_of_another_tokenizer",
            )

    def begin(self, node: SessionRequest, adapter: str) -> tuple[str, ...]:
        """Records the parts that compute a request. Returns those that have changed since the request that it
        continues."""
        parts = self._parts.now(adapter)
        self._requests[node] = Computed(next(self._numbers), parts)
        return tuple(self._changed(ancestry(node), parts))

    def report(self, session: Session) -> dict[str, object]:
        """Returns the entry of a session in a list: its owner, and the parts that have changed since its requests were
        computed. Omits adapters, because each request names its own."""
        facts = self._sessions[session]
        changed = self._changed(session.nodes.values(), self._parts.now())
        is_foreign = facts.tokenizer != self._tokenizer
        changes = ["tokenizer", *changed] if is_foreign else changed
        return {"created": facts.created_s, "model": facts.model, "changes": changes, "usable": not is_foreign}

    def _changed(self, nodes: Iterable[SessionRequest], now: Mapping[str, str]) -> list[str]:
        differing = set()
        for node in nodes:
            made_by = self._requests[node].parts
            differing |= {name.partition(" ")[0] for name, value in now.items() if made_by.get(name, value) != value}
        return [name for name in PARTS if name in differing]

    async def flush(self) -> None:
        """Writes all changes to the disk. Continues if the caller is cancelled. Raises TureenError."""
        await asyncio.shield(asyncio.ensure_future(self._write()))

    async def _write(self) -> None:
        async with self._turn:
            for session in self._used:
                self._new_sessions[self._sessions[session].number] = self._row(session)
            sessions, requests = self._new_sessions, self._new_requests
            if not self._is_open or not (sessions or requests):
                return
            self._new_sessions, self._new_requests, self._used = {}, {}, set()
            try:
                await self._file.write(sessions, requests)
            except TureenError:
                there = {facts.number for facts in self._sessions.values()}
                rows = {number: row for number, row in requests.items() if row is None or row.session in there}
                self._new_sessions = sessions | self._new_sessions
                self._new_requests = rows | self._new_requests
                raise

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.flush()
            except TureenError:  # the storage has logged it
                await asyncio.sleep(RETRY_S)

    def _row(self, session: Session) -> SessionRow:
        facts = self._sessions[session]
        used_s = self._wall() - (self._state.sessions.now_s - session.used_s)
        times = (session.timeout_s, facts.created_s, used_s)
        return SessionRow(
            facts.number, session.owner, session.name, session.capacity, *times, facts.tokenizer, facts.model
        )

    def _restore(self) -> None:
        """Raises StartupError."""
        now_s, sessions = self._wall(), self._state.sessions
        session_rows, request_rows = self._file.read(now_s)
        by_number: dict[int, Session] = {}
        for row in session_rows:
            age_s = max(0.0, now_s - row.used_s)
            session = Session(row.name, row.owner, row.capacity, row.timeout_s, self._state.sessions.now_s - age_s)
            session.keeper = self
            by_number[row.number] = session
            self._sessions[session] = KeptFacts(row.number, row.created_s, row.tokenizer, row.model)
        nodes: dict[int, SessionRequest] = {}
        for each in request_rows:
            session = by_number[each.session]
            nodes[each.number] = node = self._node(each, session, nodes)
            session.nodes[each.rid] = node
            self._requests[node] = Computed(each.number, each.made_by)
        self._numbers = itertools.count(max([*by_number, *nodes], default=0) + 1)
        for session in by_number.values():
            sessions.restore(session)

    def _node(self, row: RequestRow, session: Session, nodes: Mapping[int, SessionRequest]) -> SessionRequest:
        """Raises StartupError for a request that does not fit the one that it continues."""
        parent = None if row.parent is None else nodes.get(row.parent)
        most = 0 if parent is None else parent.num_prompt + len(parent.output_ids)
        is_lost = parent is None and row.parent is not None
        if is_lost or not 0 <= row.base <= most or (parent is not None and session.nodes.get(parent.rid) is not parent):
            where = f"{FLAG} {self._state.context.config.sessions_db}"
            message = f"{where}: it is damaged; restore it from a backup, or move it away, and a new one is created"
            raise StartupError(message, field="sessions_db")
        return SessionRequest(row.rid, parent, row.base, row.new_ids, row.output_ids, row.chars_before)


def _folder_digest(path: str) -> str:
    """Returns the digest of an adapter's files; "?" if they cannot be read any more."""
    try:
        files = sorted(file for file in Path(path).expanduser().iterdir() if file.is_file())
        return _short("".join(f"{file.name} {sample_digest(file).hex()} " for file in files))
    except OSError:
        return "?"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
