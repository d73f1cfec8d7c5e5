"""Keeps durable sessions: trees of requests, stored as token ids."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tureen.errors import StartupError, TureenError
from tureen.storage.database import Damaged, Database, Schema
from tureen.storage.packing import pack_bytes, unpack_bytes

FLAG = "--sessions-db"

SCHEMA = Schema(
    version=1,
    flag=FLAG,
    script="""
CREATE TABLE sessions (
  number INTEGER PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, capacity INTEGER NOT NULL,
  timeout_s REAL NOT NULL, created_s REAL NOT NULL, used_s REAL NOT NULL, tokenizer TEXT NOT NULL, model TEXT NOT NULL,
  UNIQUE (owner, name));
CREATE TABLE requests (
  number INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, rid TEXT NOT NULL,
  parent INTEGER, base INTEGER NOT NULL, chars_before INTEGER NOT NULL, new_ids BLOB NOT NULL, output_ids BLOB NOT NULL,
  made_by TEXT NOT NULL, UNIQUE (session, rid))
""",
)


class SessionRow(NamedTuple):
    """A session as it is kept. Times are seconds since the epoch."""

    number: int
    owner: str
    name: str
    capacity: int
    timeout_s: float
    created_s: float
    used_s: float
    tokenizer: str  # digest of what the token ids mean
    model: str  # its name when the session was opened


class RequestRow(NamedTuple):
    """A request of a session that has ended. `parent`: the number of the one that it continues."""

    number: int
    session: int
    rid: str
    parent: int | None
    base: int
    chars_before: int
    new_ids: array[int]
    output_ids: array[int]
    made_by: Mapping[str, str]  # what computed it, each part by name


class SessionFile:
    """The file of --sessions-db."""

    def __init__(self, path: str) -> None:
        """Raises StartupError."""
        self._path = path
        self._database = Database(path, SCHEMA)

    def read(self, now_s: float) -> tuple[list[SessionRow], list[RequestRow]]:
        """Returns all sessions and requests, the oldest first; forgets sessions that have not been used for their
        timeout. The caller waits. Raises StartupError."""

        def select(connection: sqlite3.Connection) -> tuple[list[SessionRow], list[RequestRow]]:
            connection.execute("DELETE FROM sessions WHERE used_s + timeout_s <= ?", (now_s,))
            sessions = connection.execute(f"SELECT {_names(SessionRow)} FROM sessions ORDER BY number")
            requests = connection.execute(f"SELECT {_names(RequestRow)} FROM requests ORDER BY number")
            return [SessionRow(*row) for row in sessions], [_unpacked(row) for row in requests]

        try:
            return self._database.run_now(select)
        except TureenError as error:
            raise StartupError(f"{FLAG} {self._path}: {error.message}", field="sessions_db") from None

    async def write(self, sessions: Mapping[int, SessionRow | None], requests: Mapping[int, RequestRow | None]) -> None:
        """Writes rows by their numbers; None = such a row is no more. When this returns, it is on the disk. Raises
        TureenError."""

        def write(connection: sqlite3.Connection) -> None:
            for table, gone in (("sessions", _gone(sessions)), ("requests", _gone(requests))):
                connection.executemany(f"DELETE FROM {table} WHERE number = ?", gone)
            _put(connection, "sessions", SessionRow, [row for row in sessions.values() if row is not None])
            _put(connection, "requests", RequestRow, [_packed(row) for row in requests.values() if row is not None])

        await self._database.run(write)
        if _gone(sessions) or _gone(requests):
            await self._database.wipe()

    def close(self) -> None:
        """Waits for what is being written, and closes the file."""
        self._database.close()


def _names(kind: type[SessionRow | RequestRow]) -> str:
    return ", ".join(kind._fields)


def _gone(rows: Mapping[int, Any]) -> list[tuple[int]]:
    return [(number,) for number, row in rows.items() if row is None]


def _put(
    connection: sqlite3.Connection, table: str, kind: type[SessionRow | RequestRow], rows: Sequence[tuple[Any, ...]]
) -> None:
    values = ", ".join("?" * len(kind._fields))
    changes = ", ".join(f"{name} = excluded.{name}" for name in kind._fields[1:])
    connection.executemany(
        f"INSERT INTO {table} ({_names(kind)}) VALUES ({values}) ON CONFLICT (number) DO UPDATE SET {changes}", rows
    )


def _packed(row: RequestRow) -> tuple[Any, ...]:
    return (
        *row[:6],
        pack_bytes(row.new_ids.tobytes()).blob,
        pack_bytes(row.output_ids.tobytes()).blob,
        msgspec.json.encode(row.made_by).decode(),
    )


def _unpacked(row: tuple[Any, ...]) -> RequestRow:
    """Raises Damaged."""
    number, session, rid, parent, base, chars_before, new_ids, output_ids, made_by = row
    try:
        parts = msgspec.json.decode(made_by, type=dict[str, str])
        prompt, output = _ids(new_ids), _ids(output_ids)
        return RequestRow(number, session, rid, parent, base, chars_before, prompt, output, parts)
    except (ValueError, TypeError) as error:  # msgspec's are ValueErrors
        raise Damaged(str(error)) from None


def _ids(packed: bytes) -> array[int]:
    """Raises Damaged, ValueError."""
    ids = array("i")
    ids.frombytes(unpack_bytes(packed))
    return ids
