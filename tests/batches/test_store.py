"""What a server that has files and batches remembers them in: a damaged one stops the start, and is let go."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tureen.batches.store import Store
from tureen.errors import StartupError


@pytest.mark.parametrize("table", ["files", "batches"])
def test_a_damaged_file_stops_the_start_by_the_flag_s_name_and_is_let_go(tmp_path, table):
    Store(str(tmp_path), 1 << 20).close()
    columns = {
        "files": "(id, client, purpose, record) VALUES ('file-1', '', 'batch', x'00')",
        "batches": "(id, client, has_ended, input_file_id, record) VALUES ('batch-1', '', 0, 'file-1', x'00')",
    }
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as connection, connection:
        connection.execute(f"INSERT INTO {table} {columns[table]}")
    with pytest.raises(StartupError, match=f"--batch-path {tmp_path}: .*damaged") as refused:
        Store(str(tmp_path), 1 << 20)
    with closing(sqlite3.connect(tmp_path / "batches.sqlite", timeout=0)) as connection:
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)
    assert refused.traceback  # which keeps the store of the refused start
