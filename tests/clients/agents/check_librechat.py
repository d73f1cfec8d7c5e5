"""LibreChat's packages: its reader of librechat.yaml, and its agents, with which its server asks a model.

The server itself is not published as a package.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_server import repeat_call
from connect_page import block
from questions import CAPITAL
from terminal import ENVIRONMENT, run

CLIENT = "LibreChat's agents"
PACKAGES = ("@librechat/agents", "librechat-data-provider")
NOTES = (
    "Its server is not a package. The package of its agents makes the requests, and its data provider reads the page's "
    "librechat.yaml. The newest agents need Node 24; this is the newest version for Node 20.",
)
SCRIPT = Path(__file__).with_name("librechat.mjs")


def ask(home, url, prompt, **settings):
    (home / "node_modules").symlink_to(ENVIRONMENT / "node_modules")
    (home / SCRIPT.name).write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    (home / "librechat.yaml").write_text(block("LibreChat", url), encoding="utf-8")
    return run(home, "node", SCRIPT.name, "librechat.yaml", json.dumps({"prompt": prompt} | settings))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_chat_whole_and_streamed(url, tmp_path, streaming):
    (part,) = json.loads(ask(tmp_path, url, CAPITAL, streaming=streaming, disableStreaming=not streaming))
    assert "Paris" in part["text"]


def test_a_tool_is_called_and_its_result_is_read(url, tmp_path):
    _, call, answer = json.loads(ask(tmp_path, url, repeat_call("get_weather", {"city": "Oslo"}), streaming=True))
    assert call["tool_call"]["output"] == "It is sunny in Oslo."
    assert "Oslo" in answer["text"]


def test_an_error_names_the_field(url, tmp_path):
    assert "top_p: expected" in ask(tmp_path, url, CAPITAL, topP=7)
