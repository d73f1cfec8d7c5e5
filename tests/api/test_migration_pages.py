"""docs/migrate-from-*.md: the flags are ours, the fields are ours, the commands work, the links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from app_under_test import App

from tureen.app.compat import compat_routes, rows_of
from tureen.cli.commands import engine
from tureen.cli.flags import CommandParser
from tureen.config import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("migrate-from-*.md"))}
COMMANDS = [
    (name, command)
    for name, page in PAGES.items()
    for command in re.findall(r"^curl .*$", page.replace("\\\n", " "), re.MULTILINE)
]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml") as running:
        yield running


def _flags() -> set[str]:
    found = {"--config"}
    for field in msgspec.structs.fields(Config):
        alias = (get_args(field.type)[1].extra or {})["alias"]
        found |= {f"--{field.name.replace('_', '-')}", *([alias] if alias else [])}
    return found


def _engine_flags() -> set[str]:
    """Those of `tureen engine`."""
    parser = CommandParser()
    engine.add_flags(parser)
    return set(parser.own_flags())


def _right_column(page: str) -> list[str]:
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [row.split(" | ")[1] for row in rows]


def test_there_is_a_page_for_each_server_that_people_come_from():
    assert {name.removeprefix("migrate-from-") for name in PAGES} == {
        "sglang",
        "vllm",
        "mindie",
        "llamacpp",
        "tgi",
        "ollama",
    }


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_that_is_said_to_be_ours_is(name):
    _, _, differences = PAGES[name].partition("**What is different**")
    commands = [line for line in PAGES[name].splitlines() if line.startswith("tureen serve")]
    text = " ".join([*_right_column(PAGES[name]), differences, *commands])
    of_engine = re.findall(r"tureen engine (--[a-z][a-z-]+)", text)
    told = re.findall(r"(?<!tureen engine )--[a-z][a-z-]+", text)
    assert len(set(told)) > 8
    assert set(told) - _flags() == set()
    assert set(of_engine) - _engine_flags() == set()


def test_every_field_that_llama_cpp_s_are_said_to_become_is_ours():
    ours = {row.field.rpartition(".")[2] for one in compat_routes() if one.api == "SGLang" for row in rows_of(one)}
    fields = PAGES["migrate-from-llamacpp"].partition("On `/generate` the fields of `/completion`")[2]
    told = {word for cell in _right_column(fields) for word in re.findall(r"`([a-z_]+)`", cell)} - {"repeat_last_n"}
    assert len(told) > 8
    assert told - ours == set()


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_each_command_works(app, name, command):
    words = shlex.split(command)
    path = words[1].removeprefix("http://127.0.0.1:30000")
    response = app.request(
        "POST", path, content=words[words.index("-d") + 1], headers={"content-type": "application/json"}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", PAGES)
def test_the_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[name]):
        assert (DOCS / target).exists(), target
