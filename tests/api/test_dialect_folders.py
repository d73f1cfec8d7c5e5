"""A dialect is a folder: whoever adds one touches nothing else."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from app_under_test import App
from page_diffs import ROOT, apply_diff, diff_of

import tureen.dialects
from tureen.fields.rules import read_tables
from tureen.http.dialect import dialects

DOCS_TOOL = ROOT / "tools" / "docs.py"

PACKAGE = Path(tureen.dialects.__file__).parents[1]


@pytest.fixture
def toy_folder(tmp_path, monkeypatch) -> Path:
    """The folder of docs/adding-a-dialect.md, found beside those of the dialects while a test runs."""
    apply_diff("adding-a-dialect.md", tmp_path)
    folder = tmp_path / "tureen" / "dialects"
    monkeypatch.setattr(tureen.dialects, "__path__", [*tureen.dialects.__path__, str(folder)])
    yield folder
    for name in [name for name in sys.modules if name.startswith("tureen.dialects.toy")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def app(toy_folder):
    with App() as running:
        yield running


def test_the_routes_of_a_folder_are_served(app):
    answer = app.post("/toy", toy_prompt="say:ab", most=2)
    assert (answer.status_code, answer.json()) == (200, {"toy": "ab"})


def test_its_bodies_are_told_apart_on_the_path_that_dialects_share(app):
    assert app.post("/generate", toy_prompt="say:ab", most=2).json() == {"toy": "ab"}
    both = app.post("/generate", toy_prompt="say:ab", text="say:ab")
    assert both.status_code == 400
    assert "got text and toy_prompt" in both.json()["error"]["message"]


def test_its_fields_are_in_the_openapi_document(app):
    document = app.request("GET", "/openapi.json").json()
    fields = document["components"]["schemas"]["ToyBody"]["properties"]
    assert fields["most"]["description"] == "Most tokens that the toy writes."
    body = document["paths"]["/toy"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ToyBody"}
    shared = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]
    assert {"$ref": "#/components/schemas/ToyBody"} in shared["schema"]["anyOf"]


def test_the_verdicts_on_its_fields_are_on_the_page_and_come_true(app):
    apis = app.request("GET", "/compat.json").json()["apis"]
    [rows] = [one["fields"] for one in apis if one["api"] == "Toy"]
    assert {row["field"]: (row["standing"], row["note"]) for row in rows} == {
        "toy_prompt": ("honoured", "What the toy reads."),
        "most": ("differs", "4 unless given"),
        "blanket": ("reported", "toys are never cold"),
        "teddy": ("refused", "there is no bear here; leave it out"),
    }
    refused = app.post("/toy", toy_prompt="say:a", teddy=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "teddy")
    assert app.post("/toy", toy_prompt="say:a", teddy=False).status_code == 200
    assert app.post("/toy", toy_prompt="say:a", blanket=1).headers["x-tureen-ignored"] == "blanket"


def test_its_body_is_a_section_of_the_page_of_parameters(toy_folder):
    spec = importlib.util.spec_from_file_location("docs_tool", DOCS_TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool._parameters_page()
    assert "| `most` | integer ≥ 1 | `4` | Most tokens that the toy writes. |" in page


def test_a_server_without_the_folder_knows_nothing_of_it():
    with App() as app:
        assert app.post("/toy", toy_prompt="say:a").status_code == 404
        assert "toy" not in json.dumps(app.request("GET", "/openapi.json").json()).lower()


def test_dialects_are_listed_in_the_order_that_they_give():
    orders = [dialect.order for dialect in dialects()]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(orders) == len([*PACKAGE.glob("dialects/*/__init__.py")])


def _imports(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    direct = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return direct | {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_a_folder_is_named_by_itself_alone():
    """But for tureen.Engine, which speaks SGLang's dialect without HTTP."""
    strangers = set()
    for file in PACKAGE.rglob("*.py"):
        own, text = f"tureen.dialects.{file.parent.name}.", file.read_text(encoding="utf-8")
        if "tureen.dialects." not in text:
            continue
        named = {name for name in _imports(text) if name.startswith("tureen.dialects.") and not name.startswith(own)}
        strangers |= {(file.name, name) for name in named}
    assert strangers == {
        ("offline.py", "tureen.dialects.sglang.generate"),
        ("offline.py", "tureen.dialects.sglang.generate.Answer"),
    }


def test_an_unknown_verdict_in_a_table_is_an_error(tmp_path):
    file = tmp_path / "fields.toml"
    file.write_text('[body.ignored]\nx = "?"\n', encoding="utf-8")
    with pytest.raises(msgspec.ValidationError, match="ignored"):
        read_tables(file)


@pytest.mark.parametrize(
    "page", ["adding-a-backend.md", "adding-a-dialect.md", "adding-a-model.md", "adding-a-parameter.md"]
)
def test_what_a_page_about_adding_changes_is_still_there(page):
    """The ledgers apply the diffs. This test fails earlier, if a line that they change is edited."""
    for part in re.split(r"^(?=--- )", diff_of(page), flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@ .*\n", part, flags=re.MULTILINE)
        path = name.split("\n")[0].removeprefix("--- ").removeprefix("a/")
        if path != "/dev/null":
            text = (ROOT / path).read_text(encoding="utf-8")
            for hunk in hunks:
                before = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in (" ", "-"))
                assert before in text, f"docs/{page} changes lines that are not in {path}:\n{before}"
