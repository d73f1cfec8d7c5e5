"""docs/openai.md: its commands and its program work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from app_under_test import App
from openai_judge import judge
from served_app import ServedApp

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*$", PAGE.replace("\\\n", " "), re.MULTILINE)
[PROGRAM] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SERVER = "http://127.0.0.1:30000"


@pytest.fixture(scope="module")
def app():
    with App(chat_template="chatml") as running:
        yield running


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_the_page_works(app: App, command):
    words = shlex.split(command)
    url = next(word for word in words if word.startswith(SERVER))
    response = app.request(
        "POST",
        url.removeprefix(SERVER),
        content=words[words.index("-d") + 1],
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200, response.text
    judge(response.json())


def test_the_program_on_the_page_works(capsys):
    with ServedApp(chat_template="chatml", preferred_sampling_params='{"max_new_tokens": 9}') as server:
        space: dict = {}
        exec(PROGRAM.replace(SERVER, server.url), space)
        space["client"].close()
    assert capsys.readouterr().out.strip()
