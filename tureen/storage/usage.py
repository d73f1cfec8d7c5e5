"""Keeps what each client used, day by day, and the state of its quota."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tureen.errors import StartupError, TureenError
from tureen.storage.database import Database, Schema

FLAG = "--usage-db"
COLUMNS = ("requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
BUCKET_S = 7 * 86400.0
"""Age at which the state of a quota is forgotten: it is full again."""

SCHEMA = Schema(
    version=1,
    flag=FLAG,
    script="""
CREATE TABLE use_of_days (
  day TEXT NOT NULL, client TEXT NOT NULL, requests INTEGER NOT NULL, failed INTEGER NOT NULL,
  prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
  PRIMARY KEY (day, client)) WITHOUT ROWID;
CREATE TABLE buckets (
  kind TEXT NOT NULL, client TEXT NOT NULL, used REAL NOT NULL, at_s REAL NOT NULL,
  PRIMARY KEY (kind, client)) WITHOUT ROWID
""",
)


class Bucket(NamedTuple):
    """The state of a quota: the tokens that it lacked at a time, in seconds since the epoch."""

    kind: str  # of the client: "name" or "address"
    client: str
    used: float
    at_s: float


class UsageFile:
    """The file of --usage-db."""

    def __init__(self, path: str) -> None:
        """Raises StartupError."""
        self._path = path
        self._database = Database(path, SCHEMA)

    def read(self) -> tuple[dict[str, tuple[int, ...]], list[Bucket]]:
        """Returns the sums of each client's COLUMNS, and the quotas. The caller waits. Raises StartupError."""

        def select(connection: sqlite3.Connection) -> tuple[dict[str, tuple[int, ...]], list[Bucket]]:
            sums = ", ".join(f"sum({name})" for name in COLUMNS)
            rows = connection.execute(f"SELECT client, {sums} FROM use_of_days GROUP BY client")
            totals = {client: tuple(values) for client, *values in rows}
            return totals, [Bucket(*row) for row in connection.execute("SELECT kind, client, used, at_s FROM buckets")]

        try:
            return self._database.run_now(select)
        except TureenError as error:
            raise StartupError(f"{FLAG} {self._path}: {error.message}") from None

    async def add(self, day: str, uses: Mapping[str, Sequence[int]], buckets: Sequence[Bucket], now_s: float) -> None:
        """Adds to what clients used on a day, and replaces the states of quotas. Raises TureenError."""

        def write(connection: sqlite3.Connection) -> None:
            more = ", ".join(f"{name} = {name} + excluded.{name}" for name in COLUMNS)
            connection.executemany(
                f"INSERT INTO use_of_days (day, client, {', '.join(COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT (day, client) DO UPDATE SET {more}",
                [(day, client, *values) for client, values in uses.items()],
            )
            connection.executemany("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", buckets)
            connection.execute("DELETE FROM buckets WHERE at_s < ?", (now_s - BUCKET_S,))

        await self._database.run(write)

    async def days(self) -> list[tuple[str, str, *tuple[int, ...]]]:
        """Returns day, client and COLUMNS of each day on which a client used something. Raises TureenError."""
        query = f"SELECT day, client, {', '.join(COLUMNS)} FROM use_of_days ORDER BY day, client"
        return await self._database.run(lambda connection: connection.execute(query).fetchall())

    def close(self) -> None:
        """Waits for what is being written, and closes the file."""
        self._database.close()
