"""Remembers files and batches in an SQLite file, beside the folder of contents; each client sees its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from tureen.batches.contents import Contents, make_folder
from tureen.batches.records import MAX_BATCHES, MAX_FILES, MAX_UNENDED, BatchRecord, Page, StoredFile
from tureen.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StartupError,
    TooManyRequests,
    TureenError,
    echo,
)
from tureen.storage.database import Damaged, Database, Schema

R = TypeVar("R", StoredFile, BatchRecord)

FLAG = "--batch-path"
SCHEMA = Schema(
    version=1,
    flag=FLAG,
    script="""
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, client TEXT NOT NULL, purpose TEXT NOT NULL,
    expires_at INTEGER, record BLOB NOT NULL) STRICT;
CREATE INDEX files_of_client ON files (client, number);
CREATE INDEX files_by_end ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, client TEXT NOT NULL,
    has_ended INTEGER NOT NULL, input_file_id TEXT NOT NULL, record BLOB NOT NULL) STRICT;
CREATE INDEX batches_of_client ON batches (client, number);
CREATE INDEX unended_batches ON batches (client, input_file_id) WHERE NOT has_ended""",
)
FULL = "storage_full"


class Store:
    """All files and batches. Event-loop thread only; what takes time happens in other threads."""

    def __init__(self, path: str, max_client_bytes: int) -> None:
        """Opens the folder `path`, or makes it. Raises StartupError."""
        folder = make_folder(path, FLAG)
        self.contents = Contents(folder / "files")
        self._database = Database(str(folder / "batches.sqlite"), SCHEMA)
        self._max_client_bytes = max_client_bytes
        self._held: Counter[str] = Counter()  # bytes that each client keeps, or is about to
        try:
            files = self._database.run_now(_all_files)
            self.unended = self._database.run_now(_unended)  # when the server started
        except TureenError as error:
            self._database.close()
            raise StartupError(f"{FLAG} {path}: {error.message}") from None
        for file in files:
            self._held[file.client] += file.num_bytes
        unfinished = {file_id for batch in self.unended for file_id in (batch.output_id, batch.error_id)}
        self.contents.prune({file.id for file in files} | unfinished)

    def close(self) -> None:
        """Closes the database; nothing may be called afterwards."""
        self._database.close()

    # ---- room

    def check_room(self, client: str, num_bytes: int) -> None:
        """Raises PayloadTooLarge when these bytes would take a client over what it may keep."""
        if self._held[client] + num_bytes > self._max_client_bytes:
            raise PayloadTooLarge(
                f"this client keeps {self._held[client]} bytes of files, and may keep {self._max_client_bytes}; delete "
                "some, or start the server with a larger --max-batch-bytes",
                code=FULL,
            )

    def hold(self, client: str, num_bytes: int) -> None:
        """Counts bytes that a client keeps from now on, or, if less than 0, no longer."""
        self._held[client] += num_bytes

    # ---- files

    async def add_file(self, file: StoredFile) -> None:
        """Remembers a file whose bytes are there. Raises PayloadTooLarge for one more than a client may have."""

        def add(connection: sqlite3.Connection) -> None:
            [count] = connection.execute("SELECT count(*) FROM files WHERE client = ?", (file.client,)).fetchone()
            if count >= MAX_FILES:
                raise PayloadTooLarge(f"this client has {count} files, the most it may; delete some", code=FULL)
            _insert_file(connection, file)

        await self._database.run(add)

    async def file(self, client: str, file_id: str, now_s: int) -> StoredFile:
        """Returns a client's file. Raises NotFound."""
        return await self._database.run(lambda connection: _file(connection, client, file_id, now_s))

    async def files(self, client: str, page: Page, now_s: int) -> tuple[list[StoredFile], bool]:
        """Returns files of a client, and whether there are more behind them. Raises InvalidRequest."""

        def select(connection: sqlite3.Connection) -> tuple[list[StoredFile], bool]:
            more = "AND (expires_at IS NULL OR expires_at > ?) AND (? IS NULL OR purpose = ?)"
            return _page(connection, StoredFile, "files", client, page, more, (now_s, page.purpose, page.purpose))

        return await self._database.run(select)

    async def delete_file(self, client: str, file_id: str, now_s: int) -> None:
        """Forgets a file. Raises NotFound, Conflict while a batch needs it."""

        def delete(connection: sqlite3.Connection) -> StoredFile:
            file = _file(connection, client, file_id, now_s)
            if _is_needed(connection, file):
                raise Conflict(
                    "the file is the input of a batch that has not ended; cancel that first", field="file_id"
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return file

        await self._removed([await self._database.run(delete)])

    async def sweep(self, now_s: int) -> None:
        """Forgets the files whose time is over, but for those that batches still need."""

        def delete(connection: sqlite3.Connection) -> list[StoredFile]:
            rows = connection.execute("SELECT record FROM files WHERE expires_at <= ?", (now_s,)).fetchall()
            files = [file for file in _decoded(StoredFile, rows) if not _is_needed(connection, file)]
            connection.executemany("DELETE FROM files WHERE id = ?", [(file.id,) for file in files])
            return files

        await self._removed(await self._database.run(delete))

    async def _removed(self, files: Sequence[StoredFile]) -> None:
        for file in files:
            self.hold(file.client, -file.num_bytes)
            await asyncio.to_thread(self.contents.remove, file.id)

    # ---- batches

    async def add_batch(self, batch: BatchRecord) -> None:
        """Remembers a new batch. Raises TooManyRequests for one more than a client may have."""

        def add(connection: sqlite3.Connection) -> None:
            [count] = connection.execute(
                "SELECT count(*) FROM batches WHERE client = ? AND NOT has_ended", (batch.client,)
            ).fetchone()
            if count >= MAX_UNENDED:
                raise TooManyRequests(
                    f"this client has {count} batches that have not ended, the most it may; cancel one, or wait",
                    code="too_many_batches",
                    retry_after_s=60,
                )
            _file(connection, batch.client, batch.input_file_id, batch.created_at)
            connection.execute(
                "INSERT INTO batches (id, client, has_ended, input_file_id, record) VALUES (?, ?, ?, ?, ?)",
                (batch.id, batch.client, False, batch.input_file_id, msgspec.json.encode(batch)),
            )
            connection.execute(
                "DELETE FROM batches WHERE has_ended AND number IN (SELECT number FROM batches WHERE client = ? "
                "ORDER BY number DESC LIMIT -1 OFFSET ?)",
                (batch.client, MAX_BATCHES),
            )

        await self._database.run(add)

    async def save_batch(self, batch: BatchRecord, files: Sequence[StoredFile] = ()) -> None:
        """Remembers a batch as it is now, and the files that it made, whose bytes are there."""

        def save(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE batches SET has_ended = ?, record = ? WHERE id = ?",
                (batch.has_ended, msgspec.json.encode(batch), batch.id),
            )
            for file in files:
                _insert_file(connection, file)

        await self._database.run(save)

    async def batch(self, client: str, batch_id: str) -> BatchRecord:
        """Returns a client's batch as it was saved last. Raises NotFound."""

        def select(connection: sqlite3.Connection) -> BatchRecord:
            rows = connection.execute("SELECT record FROM batches WHERE client = ? AND id = ?", (client, batch_id))
            for batch in _decoded(BatchRecord, rows):
                return batch
            raise NotFound(f"there is no batch {echo(batch_id)}", field="batch_id", code="batch_not_found")

        return await self._database.run(select)

    async def batches(self, client: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """Returns batches of a client, and whether there are more behind them. Raises InvalidRequest."""
        return await self._database.run(lambda connection: _page(connection, BatchRecord, "batches", client, page))


def _all_files(connection: sqlite3.Connection) -> list[StoredFile]:
    return list(_decoded(StoredFile, connection.execute("SELECT record FROM files")))


def _unended(connection: sqlite3.Connection) -> list[BatchRecord]:
    return list(
        _decoded(BatchRecord, connection.execute("SELECT record FROM batches WHERE NOT has_ended ORDER BY number"))
    )


def _insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    connection.execute(
        "INSERT INTO files (id, client, purpose, expires_at, record) VALUES (?, ?, ?, ?, ?)",
        (file.id, file.client, file.purpose, file.expires_at, msgspec.json.encode(file)),
    )


def _file(connection: sqlite3.Connection, client: str, file_id: str, now_s: int) -> StoredFile:
    """Raises NotFound."""
    rows = connection.execute("SELECT record FROM files WHERE client = ? AND id = ?", (client, file_id))
    for file in _decoded(StoredFile, rows):
        if file.expires_at is None or file.expires_at > now_s:
            return file
    raise NotFound(f"there is no file {echo(file_id)}", field="file_id", code="file_not_found")


def _is_needed(connection: sqlite3.Connection, file: StoredFile) -> bool:
    users = connection.execute(
        "SELECT 1 FROM batches WHERE client = ? AND input_file_id = ? AND NOT has_ended", (file.client, file.id)
    )
    return users.fetchone() is not None


def _page(
    connection: sqlite3.Connection,
    kind: type[R],
    table: str,
    client: str,
    page: Page,
    more: str = "",
    values: Sequence[object] = (),
) -> tuple[list[R], bool]:
    """Selects a page of a table. `more`: a further condition, with `values`. Raises InvalidRequest."""
    where = ""
    bound: list[object] = []
    if page.after is not None:
        numbers = connection.execute(f"SELECT number FROM {table} WHERE client = ? AND id = ?", (client, page.after))
        row = numbers.fetchone()
        if row is None:
            raise InvalidRequest(f"after: there is nothing with the id {echo(page.after)}", field="after")
        where = f"AND number {'>' if page.is_ascending else '<'} ?"
        bound.append(row[0])
    rows = connection.execute(
        f"SELECT record FROM {table} WHERE client = ? {where} {more} "
        f"ORDER BY number {'ASC' if page.is_ascending else 'DESC'} LIMIT ?",
        (client, *bound, *values, page.limit + 1),
    ).fetchall()
    return list(_decoded(kind, rows[: page.limit])), len(rows) > page.limit


def _decoded(kind: type[R], rows: sqlite3.Cursor | Sequence[tuple[bytes]]) -> Iterator[R]:
    for (record,) in rows:
        try:
            yield msgspec.json.decode(record, type=kind)
        except msgspec.DecodeError as error:
            raise Damaged(str(error)) from None
