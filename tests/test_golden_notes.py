"""Each recorded example says what it was computed with: the model and its arithmetic, or that there was none."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def test_each_recorded_file_says_what_it_was_computed_with():
    text = (GOLDEN / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`) \| .+ \| (.+) \|$", text, re.MULTILINE)
    noted = [name.rstrip("/") for names, _ in rows for name in re.findall(r"`([^`]+)`", names)]
    there = [path.name for path in GOLDEN.iterdir() if path.name not in ("README.md", "__pycache__")]
    assert sorted(noted) == sorted(there)


def test_each_client_of_the_page_says_what_to_type_and_what_ran():
    runs = json.loads((GOLDEN / "client_runs.json").read_text(encoding="utf-8"))
    setup = tomllib.loads((GOLDEN.parent / "clients" / "setup.toml").read_text(encoding="utf-8"))
    assert sorted(setup) == sorted(runs)
    assert [name for name, row in setup.items() if "ADDRESS" not in row["setup"] or not row["ran"]] == []
    assert [name for name, row in setup.items() if "|" in row["setup"] + row["ran"]] == []


def test_each_client_s_run_says_what_the_server_computed_with():
    runs = json.loads((GOLDEN / "client_runs.json").read_text(encoding="utf-8"))
    told = re.compile(r"weights in \w+ on \w+, --kernels")
    assert [name for name, run in runs.items() if not told.search(run["computed_with"])] == []
