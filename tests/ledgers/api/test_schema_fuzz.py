"""Schemathesis sends what `/openapi.json` says, right and wrong: nothing breaks, and no bad data is taken.

Its own runner is used, in a process of its own. What it checks: no server errors; statuses, content types and bodies of
answers as documented; data against the schema refused; keys needed where the document says so.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from app_under_test import LiveServer

GUARDS = ("contract", "dialects", "app", "http", "requests")

KEY, ADMIN_KEY = "of-a-user", "of-the-admin"
NOT_HERE = (
    "pause_generation",  # holds up everything that comes after it
    "release_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_safetensors",  # this engine has no weights
    "update_weights_from_tensor",
    "begin_weight_update",
    "start_weight_update",
    "init_weights_update_group",  # they wait for a trainer
    "init_weight_transfer_engine",
    "start_profile",
    "stop_profile",
)
CROSS_FIELD_RULES = "positive_data_acceptance"
"""A schema cannot say them all: a body that it allows may still be refused, with a reason."""


@pytest.mark.timeout(1800)
def test_the_api_does_as_its_document_says(tmp_path):
    kept = {"batch_path": str(tmp_path / "kept")}
    keys = {"api_key": KEY, "admin_api_key": ADMIN_KEY}
    with LiveServer(chat_template="chatml", context_length=256, **keys, **kept) as server:
        how = ["--max-examples", "4", "--seed", "7", "--phases", "examples,fuzzing", "--workers", "2"]
        left_out = ["--exclude-path-regex", f"^/({'|'.join(NOT_HERE)})$", "--exclude-checks", CROSS_FIELD_RULES]
        caller = ["--header", f"Authorization: Bearer {ADMIN_KEY}", "--output-sanitize", "false"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
        done = subprocess.run(
            [*command, *how, *left_out, *caller],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
        assert "Tested: 0" not in done.stdout
