"""docs/adapters.md: its commands work one after the other, its codes are those of the server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from app_under_test import App

from tureen.admin.model_routes import LoadBody, UnloadBody
from tureen.config_sources import load
from tureen.lora.adapter import KNOWN, MAX_RANK

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*$", PAGE.replace("\\\n", " "), re.MULTILINE)


def test_the_commands_on_the_page_work_one_after_the_other():
    [arguments] = re.findall(r"make serve ARGS='(.*)'", PAGE)
    words = shlex.split(arguments)
    paths = words[1::2]
    assert set(words[::2]) == {"--lora-paths"}
    assert len(COMMANDS) == 4
    with App(lora_paths=load({"lora_paths": paths}, environment={}).lora_paths) as app:
        for path in paths:
            name, _, folder = path.partition("=")
            assert app.post("/load_lora_adapter", lora_name=name, lora_path=folder).status_code == 200
        for command in COMMANDS:
            words = shlex.split(command)
            path = words[1].removeprefix("http://127.0.0.1:30000")
            headers = {"content-type": "application/json"}
            response = app.request("POST", path, content=words[words.index("-d") + 1], headers=headers)
            assert response.status_code == 200, (command, response.text)
        assert list(app.state.adapters) == ["whisper", "json"]


def test_the_folders_on_the_page_are_there():
    for folder in set(re.findall(r"examples/adapters/\w+", PAGE)):
        assert {path.name for path in (ROOT / folder).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_fields_codes_and_limits_are_on_the_page():
    for name in (*LoadBody.__struct_fields__, *UnloadBody.__struct_fields__):
        assert name in PAGE
    for code in ("invalid_adapter", "invalid_lora_name", "lora_not_found", "lora_in_use"):
        assert f"`{code}`" in PAGE
    assert f"1 to {MAX_RANK}" in PAGE
    for word in ("modules_to_save", "target_parameters", "init_lora_weights"):
        assert word in KNOWN
        assert f"`{word}" in PAGE
