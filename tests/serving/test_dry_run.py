"""Files that are loaded while a server runs are read by a process that may be lost, before an engine reads them."""

from __future__ import annotations

import asyncio
import io
import shutil

import inline_dry_run
import pytest
from real_app import RealApp, write_model
from tiny_adapters import write_adapter

from tureen.config import Config
from tureen.errors import StartupError, Unavailable
from tureen.fleet import start as fleet_start
from tureen.fleet.member import Member
from tureen.log import no_progress
from tureen.sandbox import child_process
from tureen.serving import dry_run

FAULT = "was ended by SIGSEGV"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_adapter(write_model(root / "model", 1), root / "adapter")
    return root


@pytest.fixture(scope="module")
def server(files):
    with RealApp(files / "model") as app:
        yield app


@pytest.fixture
def orders(monkeypatch):
    """The orders of dry runs, each of which finds a fault."""
    found = []

    async def fail(order):
        found.append(order)
        return FAULT

    monkeypatch.setattr(dry_run, "read_in_child", fail)
    return found


@pytest.fixture
def asked(server, monkeypatch):
    """Operations that the engine is asked for."""
    ops, call = [], server.client.call

    async def note(op, **args):
        ops.append(op)
        return await call(op, **args)

    monkeypatch.setattr(server.client, "call", note)
    return ops


@pytest.mark.parametrize(
    ("path", "field", "code", "name"),
    [
        ("/load_lora_adapter", "lora_path", "invalid_adapter", "adapter"),
        ("/update_weights_from_disk", "model_path", "invalid_model_path", "model"),
    ],
)
def test_the_engine_never_reads_what_its_reader_does_not_survive(server, files, orders, asked, path, field, code, name):
    more = {"lora_name": "a"} if name == "adapter" else {}
    answer = server.post(path, **{field: str(files / name)}, **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, code), answer.text
    assert FAULT in error["message"]
    assert [order["path"] for order in orders] == [str(files / name)]
    assert asked == []
    assert server.generate(text="Hello", sampling_params={"max_new_tokens": 2})["text"]


def test_an_adapter_is_read_for_the_model_that_is_served_whichever_that_is(server, files, orders, tmp_path):
    shutil.copytree(files / "model", tmp_path / "other")
    server.post("/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    assert orders.pop()["model_path"] == str(files / "model")
    server.state.serve_weights(path=str(tmp_path / "other"))
    server.post("/load_lora_adapter", lora_name="a", lora_path=str(files / "adapter"))
    server.state.serve_weights(path=str(files / "model"))
    assert orders.pop()["model_path"] == str(tmp_path / "other")


@pytest.mark.parametrize("op", ["unload_adapter", "pause", "release_memory"])
def test_what_reads_no_files_needs_no_dry_run(orders, op):
    asyncio.run(dry_run.dry_run(op, {}, Config()))
    assert orders == []


@pytest.mark.parametrize("is_serving", [False, True])
def test_the_model_of_a_running_server_of_several_is_tried_first_and_the_first_one_is_not(files, orders, is_serving):
    """A first model that freezes its reader holds nothing up; a signal ends the start."""
    launcher = fleet_start.Launcher(Config(), no_progress)
    launcher.app = object() if is_serving else None
    member = Member(Config(model_path=str(files / "model")), "m")
    found = launcher._find(member)
    if is_serving:
        with pytest.raises(StartupError, match=FAULT):
            asyncio.run(found)
    else:
        assert asyncio.run(found).source.path == files / "model"
    assert len(orders) == is_serving


class Child:
    """In place of a process that ends with a status."""

    def __init__(self, returncode: int) -> None:
        self.returncode, self.pid, self.stdin = returncode, 0, io.BytesIO()
        self.is_killed = False

    def poll(self) -> int:
        return self.returncode

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout: float) -> int:
        assert self.is_killed
        return self.returncode


@pytest.mark.parametrize(
    ("status", "fault"),
    [(0, ""), (-11, "was ended by SIGSEGV"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")],
)
def test_the_status_of_the_process_says_whether_the_files_can_be_read(monkeypatch, status, fault):
    child = Child(status)
    monkeypatch.setattr(child_process, "start", lambda *_, **__: child)
    assert asyncio.run(inline_dry_run.read_in_child({"path": "a"})) == fault
    assert child.is_killed


def test_a_program_that_does_not_begin_blames_no_files(monkeypatch):
    """A Python that does not find a module, for example."""
    monkeypatch.setattr(child_process, "start", lambda *_, **__: Child(1))
    with pytest.raises(Unavailable, match="cannot run here"):
        asyncio.run(inline_dry_run.read_in_child({"path": "a"}))


def test_without_a_process_nothing_is_loaded(monkeypatch):
    def start(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child_process, "start", start)
    with pytest.raises(Unavailable, match="starts no process"):
        asyncio.run(inline_dry_run.read_in_child({"path": "a"}))


def test_a_name_that_no_file_has_starts_no_process(monkeypatch):
    monkeypatch.setattr(child_process, "start", None)
    assert asyncio.run(inline_dry_run.read_in_child({"path": "a" * dry_run.MAX_ORDER_BYTES})) == ""
