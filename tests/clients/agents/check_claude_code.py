"""Claude Code, with its own instructions and tools, against the server's Messages API."""

from __future__ import annotations

import json

from agent_server import repeat_call
from connect_page import block
from questions import CAPITAL
from terminal import NOTE, run_shell

CLIENT = "Claude Code CLI"
PACKAGES = ("@anthropic-ai/claude-code",)


def ask(home, url, prompt, *more):
    printed = run_shell(home, block("Claude Code", url), "-p", prompt, "--output-format", "json", *more)
    return json.loads(printed.splitlines()[-1])


def test_a_turn(url, tmp_path):
    answer = ask(tmp_path, url, CAPITAL)
    assert (answer["type"], answer["is_error"], answer["num_turns"]) == ("result", False, 1), answer
    assert "Paris" in answer["result"]
    assert answer["usage"]["output_tokens"] > 0


def test_a_turn_with_the_name_of_a_model_of_anthropic_s(url, tmp_path):
    """For these names it asks the model to think, which the default model cannot: the server reports the field."""
    answer = ask(tmp_path, url, CAPITAL, "--model", "claude-sonnet-4-5")
    assert (answer["is_error"], answer["num_turns"], "Paris" in answer["result"]) == (False, 1, True), answer


def test_a_tool_is_called_and_its_result_is_read(url, tmp_path):
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    prompt = repeat_call("Bash", {"command": "cat note.txt"})
    answer = ask(tmp_path, url, prompt, "--allowedTools", "Bash")
    assert (answer["is_error"], answer["num_turns"], "Paris" in answer["result"]) == (False, 2, True), answer
