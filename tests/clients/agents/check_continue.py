"""Continue's CLI, over its providers for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import pytest
from agent_server import repeat_call
from connect_page import block
from questions import CAPITAL
from terminal import NOTE, run

CLIENT = "Continue's CLI"
PACKAGES = ("@continuedev/cli",)
PROVIDERS = ("openai", "anthropic")


def ask(home, url, prompt, provider="openai", more=""):
    config = block("Continue", url).replace("provider: openai", f"provider: {provider}")
    (home / "config.yaml").write_text(config + more, encoding="utf-8")
    return run(home, "cn", "--config", "config.yaml", "--auto", "-p", prompt)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat(url, tmp_path, provider):
    assert "Paris" in ask(tmp_path, url, CAPITAL, provider)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_is_called_and_its_result_is_read(url, tmp_path, provider):
    (tmp_path / "note.txt").write_text(NOTE, encoding="utf-8")
    assert "Paris" in ask(tmp_path, url, repeat_call("Read", {"filepath": "note.txt"}), provider)


def test_an_error_names_the_field(url, tmp_path):
    assert "top_p" in ask(tmp_path, url, CAPITAL, more="    defaultCompletionOptions: {topP: 7}\n")
