"""The Claude Code CLI makes a turn against the server's Messages API."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).resolve().parents[3] / "build" / "clients" / "node" / "node_modules"
SETTINGS = {
    "ANTHROPIC_MODEL": "default",
    "ANTHROPIC_SMALL_FAST_MODEL": "default",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",  # an answer that reaches it is an error there
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "DISABLE_AUTOUPDATER": "1",
}


def describe_script(script):
    """Returns the name, the title and the version of a client that a parameter names."""
    package = json.loads((MODULES / "@anthropic-ai" / "claude-code" / "package.json").read_text(encoding="utf-8"))
    return "claude_code", "Claude Code CLI", {"@anthropic-ai/claude-code": package["version"]}


@pytest.mark.parametrize("script", ["claude"])
def test_a_turn_ends_with_an_answer(url, tmp_path, script):
    """Its own instructions and tools are longer than the default model's context: it gets a short prompt and one
    tool."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE"))}
    environment |= SETTINGS | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "HOME": str(tmp_path)}
    how = ["--bare", "--system-prompt", "You are brief.", "--tools", "Read,Edit", "--output-format", "json"]
    done = subprocess.run(
        [str(MODULES / ".bin" / script), "-p", "Say hello.", *how],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert (answer["type"], answer["is_error"]) == ("result", False), done.stdout[-2000:]
    assert answer["result"]
    assert answer["usage"]["output_tokens"] > 0
