"""Codex, with its own instructions and tools, against the server's Responses API."""

from __future__ import annotations

import json

from agent_server import repeat_call
from connect_page import block
from questions import CAPITAL
from terminal import NOTE, run

CLIENT = "Codex CLI"
PACKAGES = ("@openai/codex",)
COMMAND = ("codex", "exec", "--json", "--skip-git-repo-check", "-s", "read-only")


def ask(home, url, prompt):
    """Returns what it did in the turn: the items of its events."""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(block("Codex", url), encoding="utf-8")
    events = [json.loads(line) for line in run(home, *COMMAND, prompt).splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed", events
    return [event["item"] for event in events if event["type"] == "item.completed"]


def test_a_turn(url, tmp_path):
    assert "Paris" in ask(tmp_path, url, CAPITAL)[-1]["text"]


def test_a_tool_is_called_and_its_result_is_read(url, tmp_path):
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    *_, call, answer = ask(tmp_path, url, repeat_call("exec_command", {"cmd": "cat note.txt"}))
    assert (call["type"], NOTE in call["aggregated_output"]) == ("command_execution", True)
    assert "Paris" in answer["text"]
