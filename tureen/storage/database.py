"""Runs transactions on one SQLite file, in a thread apart from the event loop.

A transaction that has ended is on the disk: neither `kill -9` nor a machine that loses its power undoes it. The file
belongs to one process at a time, is readable by its owner only, and says of which version it is.

Sources: https://www.sqlite.org/pragma.html, https://www.sqlite.org/rescode.html, https://www.sqlite.org/wal.html
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from tureen.errors import RequestFailed, StartupError, TureenError, Unavailable, echo
from tureen.files import NotRegular, open_regular
from tureen.log import get_logger

T = TypeVar("T")

Work = Callable[[sqlite3.Connection], T]
"""A transaction: all that it writes is written, or, when it raises, nothing."""

APPLICATION_ID = 0x74757265
"""Number in the file's head that says it is this server's: "ture" in ASCII."""

HEADER = b"SQLite format 3\0"
LOCK_WAIT_S = 2.0
"""Time that the last process has to let go of the file."""

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = get_logger("storage")


class Damaged(Exception):
    """The file has something else in it than was written there."""


class Schema(NamedTuple):
    """The tables of a file. `version` rises with every change to what is stored."""

    version: int
    script: str
    flag: str  # the setting that names the file


class Database:
    """A file of one schema; `run` is its only door."""

    def __init__(self, path: str, schema: Schema) -> None:
        """Opens the file or makes it. Raises StartupError naming the setting and what to do."""
        self._flag = schema.flag
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        try:
            self._connection = self._thread.submit(_open, path, schema).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Work[T]) -> T:
        """Returns what the transaction `work` returns, once what it wrote is on the disk. It goes on when the caller is
        cancelled.

        Raises what `work` raises; Unavailable when the disk is full, RequestFailed when the file cannot be read or
        written.
        """
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._transact, work)))

    def run_now(self, work: Work[T]) -> T:
        """Does as `run`, and the caller waits: for a start."""
        return self._thread.submit(self._transact, work).result()

    async def wipe(self) -> None:
        """Takes what was deleted out of the log that SQLite keeps beside the file. Raises as `run`."""

        def checkpoint() -> None:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise self._failure(error) from None

        await asyncio.wrap_future(self._thread.submit(checkpoint))

    def close(self) -> None:
        """Waits for the transactions so far, and closes the file."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _transact(self, work: Work[T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            result = work(connection)
            connection.execute("COMMIT")
        except (sqlite3.Error, Damaged) as error:
            self._roll_back()
            raise self._failure(error) from None
        except BaseException:
            self._roll_back()
            raise
        return result

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # SQLite itself may have rolled back
            self._connection.execute("ROLLBACK")

    def _failure(self, error: Exception) -> TureenError:
        log.error("%s: %s: %s", self._flag, type(error).__name__, error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lower byte is the kind of error
        if code == sqlite3.SQLITE_FULL:
            return Unavailable(
                f"the disk of {self._flag} is full, so nothing can be stored until the operator frees space; requests "
                "that store nothing, such as with store: false, still work",
                code="storage_full",
            )
        if code in DAMAGED or isinstance(error, Damaged):
            return RequestFailed(
                f"the file of {self._flag} is damaged, so its contents cannot be trusted; the operator must restore "
                "it, or start with a new file",
                code="storage_damaged",
            )
        return RequestFailed(
            f"the file of {self._flag} cannot be read or written now; the server's log says why", code="storage_failed"
        )


def size_of(connection: sqlite3.Connection) -> int:
    """Returns the bytes of the file that are in use."""
    pages, free, page_size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page_size)


def _open(path: str, schema: Schema) -> sqlite3.Connection:
    where = f"{schema.flag} {path}"
    try:
        is_new = _make_or_check(path, where)
        connection = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
    except ValueError:
        raise StartupError(f"{schema.flag} {echo(path)}: this is not a valid file name") from None
    except OSError as error:
        raise StartupError(f"{where}: cannot open it: {error.strerror}") from None
    except sqlite3.Error as error:
        raise StartupError(f"{where}: cannot open it: {error}") from None
    try:
        _prepare(connection, schema, where, is_new=is_new)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise StartupError(f"{where}: {_why(error)}") from None
        raise
    return connection


def _make_or_check(path: str, where: str) -> bool:
    """Makes an empty file for its owner only, or checks the one that is there. Returns whether it is empty. Raises
    OSError, ValueError, StartupError."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return True
    except FileExistsError:
        pass
    try:
        with open_regular(path) as file:
            head, mode = file.read(len(HEADER)), os.fstat(file.fileno()).st_mode
    except NotRegular as error:
        raise StartupError(f"{where}: {error.strerror}; name a file") from None
    if head not in (b"", HEADER):
        raise StartupError(f"{where}: it is not an SQLite file; name another, or move it away")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise StartupError(f"{where}: every user of this machine may read or change it; run chmod 600 on it")
    return not head


def _prepare(connection: sqlite3.Connection, schema: Schema, where: str, *, is_new: bool) -> None:
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # of two servers on one file the second does not start
    if not is_new:
        _check_version(connection, schema, where)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # what a client deletes is not left in free pages
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")
    if not connection.execute("PRAGMA user_version").fetchone()[0]:
        for statement in schema.script.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {schema.version}")
    connection.execute("COMMIT")


def _check_version(connection: sqlite3.Connection, schema: Schema, where: str) -> None:
    """Raises StartupError for a file of another program or version; one that was made and not filled is neither."""
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not (owner or version or tables):
        return
    if owner != APPLICATION_ID:
        raise StartupError(f"{where}: it is another program's database; name another file")
    if version != schema.version:
        raise StartupError(
            f"{where}: it has version {version}, but this tureen reads version {schema.version}; name a new file, or "
            "use the tureen that wrote it"
        )


def _why(error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process has it open, such as a running server; each server needs its own file"
    if code in DAMAGED:
        return "it is damaged; restore it from a backup, or move it away, and a new one is created"
    if code == sqlite3.SQLITE_FULL:
        return "the disk is full; make room"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return "it or its folder is not writable; the server needs to write both"
    return f"cannot open it: {error}"
