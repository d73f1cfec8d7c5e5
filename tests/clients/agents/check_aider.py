"""aider, with one message on its command line."""

from __future__ import annotations

import pytest
from connect_page import block
from questions import CAPITAL
from terminal import NOTE, run_shell

CLIENT = "aider"
PACKAGES = ("aider-chat",)
ASKED = ("--yes-always", "--no-git", "--no-check-update")


def ask(home, url, message, *more):
    return run_shell(home, block("aider", url), *ASKED, *more, "--message", message)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_chat_whole_and_streamed(url, tmp_path, stream):
    assert "Paris" in ask(tmp_path, url, CAPITAL, stream)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_file_is_edited(url, tmp_path, stream):
    (tmp_path / "note.txt").write_text("It is Lyon.\n", encoding="utf-8")
    printed = ask(tmp_path, url, f"Repeat: note.txt\n```\n{NOTE}\n```", stream, "note.txt")
    assert "Applied edit to note.txt" in printed
    assert "Paris" in (tmp_path / "note.txt").read_text(encoding="utf-8"), printed


def test_an_error_names_the_field(url, tmp_path):
    settings = "[{name: openai/default, extra_params: {top_p: 7}}]"
    (tmp_path / "settings.yml").write_text(settings, encoding="utf-8")
    assert "top_p: expected" in ask(tmp_path, url, CAPITAL, "--model-settings-file", "settings.yml")
