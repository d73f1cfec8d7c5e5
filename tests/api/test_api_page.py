"""docs/api.md: its requests work, its tables are complete."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from app_under_test import App

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*$", PAGE.replace("\\\n", " "), re.MULTILINE)


@pytest.fixture(scope="module")
def app():
    with App(chat_template="chatml") as running:
        yield running


def run(app: App, command: str):
    words = shlex.split(command)
    url = next(word for word in words if word.startswith("http://"))
    data = words[words.index("-d") + 1] if "-d" in words else None
    method = "POST" if data or "POST" in words else "GET"
    headers = {"content-type": "application/json"} if "-H" in words else {}
    return app.request(method, url.removeprefix("http://127.0.0.1:30000"), content=data, headers=headers)


def test_the_commands_on_the_page_work_one_after_the_other(tmp_path):
    places = {"batch_path": "batches", "responses_store": "kept.db", "sessions_db": "sessions.db"}
    with App(chat_template="chatml", **{name: str(tmp_path / place) for name, place in places.items()}) as app:
        for command in COMMANDS:
            response = run(app, command)
            if re.search("/rerank(ing)?", command):
                assert "this model generates text" in response.text
            elif re.search("/(predict|embed_sparse|embed_all) ", command):
                assert response.status_code == 424
            elif "/infill" in command:
                assert "no tokens for filling in a gap" in response.text
            elif "/classify" in command:
                assert response.json()["error"]["code"] == "not_a_classification_model"
            elif "_expert_distribution_record" in command:
                assert response.json()["error"]["code"] == "no_experts"
            elif ":30000/models/" in command:
                assert response.json()["error"]["code"] == "not_available"  # this server has one model
            elif "/generate_from_file" in command:
                assert response.status_code == 403  # there is none of that name
            elif "/update_weights_from_disk" in command:
                assert response.json()["error"]["code"] == "invalid_model_path"  # there is none of that name
            else:
                assert response.status_code == 200, (command, response.text)


def test_every_route_is_in_the_table_and_has_a_command(app: App):
    for route in app.app.routes:
        path = re.sub(r"{\w+:path}", "NAME", route.path)
        assert f"{path}`" in PAGE
        if not path.startswith("/get_") and "NAME" not in path and "{" not in path:
            assert any(path in command for command in COMMANDS)


def test_the_answer_and_the_error_on_the_page_are_those_of_the_server(app: App):
    answer, error = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    real = app.generate(text="say:a")
    assert set(answer) == set(real)
    assert set(answer["meta_info"]) == set(real["meta_info"])
    assert error["error"] == app.error(text="a", sampling_params={"temprature": 0})
