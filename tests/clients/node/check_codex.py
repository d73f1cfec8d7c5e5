"""The Codex CLI makes a turn against the server's Responses API."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).resolve().parents[3] / "build" / "clients" / "node" / "node_modules"
CONFIG = """\
model = "default"
model_instructions_file = "{instructions}"
model_provider = "tureen"
[model_providers.tureen]
name = "tureen"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def describe_script(script):
    """Returns the name, the title and the version of a client that a parameter names."""
    package = json.loads((MODULES / "@openai" / "codex" / "package.json").read_text(encoding="utf-8"))
    return "codex", "Codex CLI", {"@openai/codex": package["version"]}


@pytest.mark.parametrize("script", ["codex"])
def test_a_turn_ends_with_an_answer(url, tmp_path, script):
    (tmp_path / "home").mkdir()
    instructions = tmp_path / "instructions.md"  # its own are longer than the default model's context
    instructions.write_text("You are brief.", encoding="utf-8")
    config = CONFIG.format(url=url, instructions=instructions)
    (tmp_path / "home" / "config.toml").write_text(config, encoding="utf-8")
    environment = os.environ | {"CODEX_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    command = [
        str(MODULES / ".bin" / script),
        "exec",
        "--json",
        "--skip-git-repo-check",
        "-s",
        "read-only",
        "Say hello.",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kinds = [event["type"] for event in events]
    assert "turn.completed" in kinds, done.stdout[-2000:] + done.stderr[-2000:]
    assert "error" not in kinds
