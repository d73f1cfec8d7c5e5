"""The way of a plain /generate through the package is as short as it was."""

import json
from pathlib import Path

from walk import walk

RATCHETS = Path(__file__).resolve().parents[2] / "tools" / "ratchets.json"


def test_a_plain_generate_enters_no_more_files_and_makes_no_more_moves_than_before():
    allowed = json.loads(RATCHETS.read_text(encoding="utf-8"))["walk of a plain /generate"]
    recorded = walk()
    print(*recorded.path, sep="\n")  # pytest -s shows the way
    print(f"{len(recorded.files)} files, {len(recorded.path)} moves")
    assert len(recorded.files) <= allowed["files"]
    assert len(recorded.path) <= allowed["moves"]


def test_the_walk_is_the_same_each_time():
    assert walk().path == walk().path
