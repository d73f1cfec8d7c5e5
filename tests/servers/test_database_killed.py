"""A process that writes the database is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from timeouts import PATIENCE_S

from tureen.storage.database import Schema

SCHEMA = Schema(version=3, flag="--notes", script="CREATE TABLE notes (note TEXT)")


def put(note: str):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (note,))


WRITER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_database_killed import SCHEMA, put
from tureen.storage.database import Database

async def write():
    database = Database({path!r}, SCHEMA)
    for number in range(100000):
        await database.run(put(str(number)))
        print(number, flush=True)

asyncio.run(write())
"""


def test_a_process_that_is_killed_between_two_writes_loses_none_that_ended(tmp_path):
    path = str(tmp_path / "notes.db")
    script = WRITER.format(tests=str(Path(__file__).parent), path=path)
    command = [sys.executable, "-c", script]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as writer:
        said = [writer.stdout.readline() for _ in range(25)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
        writer.wait(PATIENCE_S)
    told = [line.strip() for line in said if line.endswith("\n")]
    assert len(told) >= 25
    with closing(sqlite3.connect(path)) as connection:
        kept = [note for (note,) in connection.execute("SELECT note FROM notes ORDER BY rowid")]
    assert kept[: len(told)] == told
