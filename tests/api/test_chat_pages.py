"""docs/anthropic.md, docs/ollama.md and docs/responses.md: their commands and their programs work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from app_under_test import App
from served_app import ServedApp

SERVER = "http://127.0.0.1:30000"
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("anthropic", "ollama", "responses")}


@pytest.mark.parametrize("page", PAGES)
def test_each_command_on_the_page_works(page, tmp_path):
    commands = re.findall(r"^curl .*$", PAGES[page].replace("\\\n", " "), re.MULTILINE)
    assert commands
    with App(chat_template="chatml", responses_store=str(tmp_path / "responses.db")) as app:
        for words in map(shlex.split, commands):
            url = next(word for word in words if word.startswith(SERVER))
            body = words[words.index("-d") + 1]
            headers = {"content-type": "application/json"}
            response = app.request("POST", url.removeprefix(SERVER), content=body, headers=headers)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("page", PAGES)
def test_the_program_on_the_page_works(page, capsys):
    [program] = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    with ServedApp(chat_template="chatml", preferred_sampling_params='{"max_new_tokens": 9}') as server:
        space: dict = {}
        exec(program.replace(SERVER, server.url), space)
        close = getattr(space["client"], "close", None)
        if close is not None:
            close()
    assert capsys.readouterr().out.strip()
