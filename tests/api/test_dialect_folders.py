"""A dialect is a folder: whoever adds one touches nothing else."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import pytest
from app_under_test import App

import tureen.dialects
from tureen.http.dialect import dialects
from tureen.requests.verdicts import read_tables

DOCS_TOOL = Path(__file__).resolve().parents[2] / "tools" / "docs.py"

PACKAGE = Path(tureen.dialects.__file__).parents[1]

DIALECT = '''
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse

from tureen.requests.body import convert, offered, read_json
from tureen.http.dialect import BodyPart, BodySection, Dialect, Docs, Entry, GenerateForm, CompatRoute, client_name
from tureen.requests.drafts import Options, one_prompt, plan_of
from tureen.requests.generation import Run
from tureen.requests.planning import Names, make_sampling
from tureen.requests.prompts import Prompt
from tureen.requests.tokenising import tokenize
from tureen.requests.verdicts import read_tables

TABLE = read_tables(Path(__file__).with_name("fields.toml"))["body"]


class ToyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /toy`."""

    toy_prompt: Annotated[str, Meta(description="What the toy reads.")]
    most: Annotated[int, Meta(ge=1, description="Most tokens that the toy writes.")] = 4


async def respond(given: dict[str, Any], request: Request, state: Any) -> JSONResponse:
    body = convert(offered(given, ToyBody.__struct_fields__, TABLE), ToyBody, table=TABLE)
    sampling = make_sampling({"max_new_tokens": body.most, "temperature": 0.0}, state.context, Names())
    [ids] = await tokenize([body.toy_prompt], ["toy_prompt"], state.context)
    draft = one_prompt(Prompt(ids), "toy_prompt", sampling, Options(), owner=client_name(request))
    async for event in Run(state, plan_of(draft, state)).events():
        output = event.output
    return JSONResponse({"toy": output.text})


def routes(state: Any) -> list[Entry]:
    async def toy(request: Request) -> JSONResponse:
        return await respond(read_json(None, await request.body()), request, state)

    about = Docs("Toy", "Play.", (ToyBody,), {"toy_prompt": "say:a"})
    return [Entry("/toy", toy, access="user", methods=["POST"], docs=about)]


DIALECT = Dialect(
    order=1000,
    routes=routes,
    compat=(CompatRoute("Toy", "/toy", (BodyPart(ToyBody, TABLE),)),),
    sections=(BodySection("`POST /toy`", "Play.", ToyBody),),
    generate=GenerateForm(("toy_prompt",), ToyBody, respond),
)
'''
FIELDS = """
[body.differs]
most = "4 unless given"

[body.told]
blanket = "toys are never cold"

[body.refused]
teddy = { nothing = false, why = "there is no bear here; leave it out" }
"""


@pytest.fixture
def toy_folder(tmp_path, monkeypatch) -> Path:
    """A folder like those of the dialects, found beside them while a test runs."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "dialect.py").write_text(DIALECT, encoding="utf-8")
    (folder / "fields.toml").write_text(FIELDS, encoding="utf-8")
    monkeypatch.setattr(tureen.dialects, "__path__", [*tureen.dialects.__path__, str(tmp_path)])
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
        "blanket": ("told", "toys are never cold"),
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
    page = tool.pages()["parameters.md"]
    assert "| `most` | integer ≥ 1 | `4` | Most tokens that the toy writes. |" in page


def test_a_server_without_the_folder_knows_nothing_of_it():
    with App() as app:
        assert app.post("/toy", toy_prompt="say:a").status_code == 404
        assert "toy" not in json.dumps(app.request("GET", "/openapi.json").json()).lower()


def test_dialects_are_listed_in_the_order_that_they_give():
    orders = [dialect.order for dialect in dialects()]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(orders) == len([*PACKAGE.glob("dialects/*/__init__.py")])


def _imports(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    direct = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return direct | {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_a_folder_is_named_by_itself_alone():
    """But for tureen.Engine, which speaks SGLang's dialect without HTTP."""
    strangers = set()
    for file in PACKAGE.rglob("*.py"):
        own = f"tureen.dialects.{file.parent.name}."
        named = {name for name in _imports(file) if name.startswith("tureen.dialects.") and not name.startswith(own)}
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
