"""Cline's CLI, set up by its own command for a server that is like OpenAI's."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from agent_server import repeat_call
from connect_page import block
from questions import CAPITAL
from terminal import NOTE, run, run_shell

CLIENT = "Cline's CLI"
PACKAGES = ("cline",)


@pytest.fixture(autouse=True)
def _end_of_its_daemon(tmp_path):
    """Ends the process that it leaves running in the background."""
    yield
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if f"\0--cwd\0{tmp_path}\0".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGTERM)


def ask(home, url, prompt):
    """Returns the events that it prints."""
    run_shell(home, block("Cline", url))
    printed = run(home, "cline", "--json", "--retries", "1", prompt)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_a_chat(url, tmp_path):
    *_, result = ask(tmp_path, url, CAPITAL)
    assert (result["finishReason"], "Paris" in result["text"]) == ("completed", True)
    assert result["usage"]["outputTokens"] > 0


def test_a_tool_is_called_and_its_result_is_read(url, tmp_path):
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    events = ask(tmp_path, url, repeat_call("run_commands", {"commands": ["cat note.txt"]}))
    assert (events[-1]["finishReason"], events[-1]["iterations"]) == ("completed", 2)
    assert NOTE in json.dumps(events)


def test_a_prompt_that_is_too_long_is_an_error_that_says_so(url, tmp_path):
    *_, error = ask(tmp_path, url, "long " * 9000)
    assert "the model's context length" in error["message"]
