"""One SQLite file of the server's: who may have it, what of it is kept, what is said when it cannot be used."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from timeouts import PATIENCE_S

from tureen.errors import RequestFailed, StartupError, TureenError, Unavailable
from tureen.storage import database
from tureen.storage.database import APPLICATION_ID, Damaged, Database, Schema
from tureen.storage.packing import pack, unpack

SCHEMA = Schema(version=3, flag="--notes", script="CREATE TABLE notes (note TEXT)")


def put(note: str):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (note,))


def notes(connection: sqlite3.Connection) -> list[str]:
    return [note for (note,) in connection.execute("SELECT note FROM notes ORDER BY rowid")]


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "notes.db")


def kept(path: str) -> list[str]:
    """What another program reads in the file."""
    with closing(sqlite3.connect(path)) as connection:
        return notes(connection)


def with_database(path: str, *works, schema: Schema = SCHEMA) -> list:
    async def scenario() -> list:
        database = Database(path, schema)
        try:
            return [await database.run(work) for work in works]
        finally:
            database.close()

    return asyncio.run(scenario())


def test_what_was_written_is_there_at_the_next_start(path):
    with_database(path, put("a"), put("b"))
    assert with_database(path, notes) == [["a", "b"]]
    assert kept(path) == ["a", "b"]


def test_the_file_and_sqlites_log_are_for_their_owner_only(path, tmp_path):
    def modes(_: sqlite3.Connection) -> dict[str, int]:
        return {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}

    mask = os.umask(0)
    try:
        [_, found] = with_database(path, put("a"), modes)
    finally:
        os.umask(mask)
    assert found == {"notes.db": 0o600, "notes.db-wal": 0o600}


def test_what_is_raised_undoes_the_transaction(path):
    def fail(connection: sqlite3.Connection) -> None:
        put("lost")(connection)
        raise KeyError

    with pytest.raises(KeyError):
        with_database(path, put("a"), fail)
    assert kept(path) == ["a"]


def test_a_caller_that_is_cancelled_loses_nothing(path):
    async def scenario() -> None:
        database = Database(path, SCHEMA)
        for number in range(20):
            writing = asyncio.ensure_future(database.run(put(str(number))))
            await asyncio.sleep(0)
            writing.cancel()
        database.close()

    asyncio.run(scenario())
    assert set(kept(path)) <= {str(number) for number in range(20)}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def refusal(path: str, schema: Schema = SCHEMA) -> str:
    with pytest.raises(StartupError) as refused:
        with_database(path, schema=schema)
    return refused.value.message


def test_a_file_is_for_one_server(path, monkeypatch):
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.0)

    async def scenario() -> str:
        first = Database(path, SCHEMA)
        try:
            with pytest.raises(StartupError) as refused:
                await asyncio.to_thread(Database, path, SCHEMA)
        finally:
            first.close()
        return refused.value.message

    assert asyncio.run(scenario()).endswith(
        "another process has it open, such as a running server; each server needs its own file"
    )


def test_a_file_of_another_version_is_refused_with_both_numbers(path):
    with_database(path, put("a"))
    message = refusal(path, SCHEMA._replace(version=4))
    assert "version 3" in message
    assert "reads version 4" in message
    assert message.startswith(f"--notes {path}: ")
    assert kept(path) == ["a"]


def test_a_database_of_another_program_is_left_alone(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE precious (x)")
    Path(path).chmod(0o600)
    before = Path(path).read_bytes()
    assert "another program's database" in refusal(path)
    assert Path(path).read_bytes() == before


def test_a_file_that_was_made_and_never_filled_is_filled(path):
    Path(path).touch(0o600)
    assert with_database(path, put("a"), notes)[1] == ["a"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_paths_that_cannot_be_used_are_refused_with_the_reason(tmp_path):
    text, shared = tmp_path / "text", tmp_path / "shared.db"
    text.write_text("no database at all")
    with_database(str(shared), put("a"))
    shared.chmod(0o644)
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        tmp_path / "nowhere" / "x.db": "No such file or directory",
        tmp_path: "it is a folder, not a regular file",
        tmp_path / "pipe": "a named pipe",
        text: "it is not an SQLite file",
        shared: "run chmod 600 on it",
        Path("a\0b"): "this is not a valid file name",
    }
    assert {path: reason in refusal(str(path)) for path, reason in reasons.items()} == dict.fromkeys(reasons, True)


def test_a_file_whose_head_is_damaged_is_refused(path):
    with_database(path, put("a"))
    content = bytearray(Path(path).read_bytes())
    content[100:4096] = bytes(255 for _ in range(3996))
    Path(path).write_bytes(content)
    assert "it is damaged; restore it" in refusal(path)


def failure(path: str, *works) -> TureenError:
    with pytest.raises(TureenError) as failed:
        with_database(path, *works)
    return failed.value


def test_damaged_pages_are_an_error_of_the_request_and_never_an_answer(path):
    with_database(path, *(put(f"{number}" * 3000) for number in range(20)))
    content = bytearray(Path(path).read_bytes())
    for page in range(3, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = os.urandom(64)
    Path(path).write_bytes(content)
    error = failure(path, notes)
    assert isinstance(error, RequestFailed)
    assert error.code == "storage_damaged"
    assert path not in error.message


def test_a_full_disk_is_told_and_leaves_the_file_as_it_was(path):
    def limit(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 4")  # SQLite's own way to have a small disk

    error = failure(path, put("a"), limit, put("x" * 100_000))
    assert isinstance(error, Unavailable)
    assert error.code == "storage_full"
    assert "store: false" in error.message
    assert kept(path) == ["a"]


def test_a_file_that_can_no_longer_be_written_is_an_error_of_the_request(path):
    error = failure(path, lambda connection: connection.execute("PRAGMA query_only = ON"), put("a"))
    assert error.code == "storage_failed"
    assert error.status == 500


def test_packed_values_come_back_and_damaged_ones_do_not():
    value = {"text": "Köln " * 1000, "list": [1, None, 2.5]}
    packed = pack(value)
    assert unpack(packed.blob) == value
    assert len(packed.blob) < packed.num_bytes
    for at in range(len(packed.blob)):
        broken = bytearray(packed.blob)
        broken[at] ^= 1
        with pytest.raises(Damaged):
            _check_same(unpack(bytes(broken)), value)
    for blob in (b"", b"x", packed.blob[:-1], zlib.compress(b"{")):
        with pytest.raises(Damaged):
            unpack(blob)


def _check_same(found, value) -> None:
    """A flipped bit may leave the value as it is; it may not change it."""
    assert found == value
    raise Damaged


def test_what_was_deleted_is_neither_in_the_file_nor_in_its_log(path, tmp_path):
    def contents(_: sqlite3.Connection) -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.iterdir())

    async def scenario() -> tuple[bytes, bytes]:
        database = Database(path, SCHEMA)
        await database.run(put("a secret"))
        before = await database.run(contents)
        await database.run(lambda connection: connection.execute("DELETE FROM notes"))
        await database.wipe()
        after = await database.run(contents)
        database.close()
        return before, after

    before, after = asyncio.run(scenario())
    assert b"a secret" in before
    assert b"a secret" not in after


def test_a_transaction_that_waits_for_its_turn_goes_on_when_its_caller_is_cancelled(path):
    may_end = threading.Event()

    async def scenario() -> None:
        database = Database(path, SCHEMA)
        first = asyncio.create_task(database.run(lambda _: may_end.wait(PATIENCE_S)))
        second = asyncio.create_task(database.run(put("a")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        may_end.set()
        await first
        database.close()

    asyncio.run(scenario())
    assert kept(path) == ["a"]
