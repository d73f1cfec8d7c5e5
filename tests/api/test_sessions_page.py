"""docs/sessions.md: its commands work, its tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from app_under_test import App

from tureen.admin.session_routes import ForkBody, OpenBody, SaveBody
from tureen.sessions.sessions import MAX_REQUESTS, MAX_TOKENS
from tureen.sessions.tree import SessionParams

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sessions.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*$", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_the_commands_on_the_page_work_one_after_the_other(tmp_path):
    assert len(COMMANDS) == 13
    with App(sessions_db=str(tmp_path / "sessions.db")) as app:
        for command in COMMANDS:
            words = shlex.split(command)
            [path] = [word.removeprefix("http://localhost:30000") for word in words if word.startswith("http:")]
            if "-d" in words:
                headers = {"content-type": "application/json"}
                response = app.request("POST", path, content=words[words.index("-d") + 1], headers=headers)
            else:
                response = app.request(words[words.index("-X") + 1] if "-X" in words else "GET", path)
            assert response.status_code == 200, (command, response.text)
        assert len(app.state.sessions) == 0


def test_every_field_and_limit_is_on_the_page():
    for name in (*OpenBody.__struct_fields__, *SessionParams.__struct_fields__):
        assert f"\n| `{name}` |" in PAGE
    for name in {*SaveBody.__struct_fields__, *ForkBody.__struct_fields__}:
        assert f"`{name}`" in PAGE
    assert f"| {MAX_REQUESTS}, then 400" in PAGE
    assert MAX_TOKENS == 2**25
    assert "2²⁵" in PAGE
