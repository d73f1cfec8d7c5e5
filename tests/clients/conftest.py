"""A real server for real clients. `--url` names one that runs already; `--record` keeps what the clients send."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "servers"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from recorder import Recorder
from server_process import ServerProcess
from timeouts import wait_until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = str(ROOT / ".venv" / "bin" / "python")

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="of a server that runs already")
    parser.addoption("--record", action="store_true", help="write what the clients send to tests/golden/clients")


@pytest.fixture(scope="session")
def server_options() -> tuple[str, ...]:
    """More flags of the server. An environment's own conftest.py may give some."""
    return ()


@pytest.fixture(scope="session")
def server_url(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, server_options: tuple[str, ...]
) -> Iterator[str]:
    if pytestconfig.getoption("--url"):
        yield pytestconfig.getoption("--url")
        return
    kept = tmp_path_factory.mktemp("kept")
    stores = ("--responses-store", str(kept / "responses.db"), "--batch-path", str(kept / "batches"))
    with ServerProcess(*stores, *server_options, python=PYTHON) as server:
        yield server.wait_ready().url


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config, server_url: str) -> Iterator[Recorder | None]:
    if not pytestconfig.getoption("--record"):
        yield None
        return
    running = Recorder(server_url)
    yield running
    running.close()


@pytest.fixture
def url(server_url: str, recorder: Recorder | None, request: pytest.FixtureRequest) -> str:
    """Returns the address of the server, or of the recorder in front of it.

    A module says what client it runs in CLIENT (a title) and PACKAGES (the client's packages, of Python or Node); a
    test with a parameter `script` runs the client that `describe_script` of its module describes.
    """
    if recorder is None:
        return server_url
    module, name = request.module, request.module.__name__.removeprefix("check_")
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "script" in parameters:
        name, title, versions = module.describe_script(parameters["script"])
        check = "its script"
    else:
        folder = Path(module.__file__).parent.name
        title, versions = module.CLIENT, {package: _version(package, folder) for package in module.PACKAGES}
        check = _sentence(request.node.originalname)
    recorder.client = name
    run = recorder.runs.setdefault(name, {"checks": [], "failed": [], "told": [], "refused": []})
    notes = list(getattr(module, "NOTES", ()))
    run |= {"title": title, "versions": versions, "checks": sorted({*run["checks"], check}), "notes": notes}
    return recorder.url


def _sentence(test: str) -> str:
    return test.removeprefix("test_").replace("_s_", "'s ").replace("_", " ")


def _version(package: str, folder: str) -> str:
    manifest = ROOT / "build" / "clients" / folder / "node_modules" / package / "package.json"
    return json.loads(manifest.read_text(encoding="utf-8"))["version"] if manifest.exists() else version(package)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a failed check with the client's run."""
    report = yield
    recorder = getattr(item, "funcargs", {}).get("recorder")
    if recorder is not None and report.failed:
        run = recorder.runs[recorder.client]
        run["failed"] = sorted({*run["failed"], _sentence(item.originalname)})
    return report


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The served model's tokenizer, for clients that count or make tokens themselves."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, str(HERE / "write_tokenizer.py"), str(folder)], check=True)
    return str(folder)


@pytest.fixture
def aborted(server_url: str) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which a request is to be left; at its end it waits until the server has aborted one."""

    def count() -> float:
        with urllib.request.urlopen(f"{server_url}/metrics") as answer:
            text = answer.read().decode()
        return float(re.search(r"^\w+:num_aborted_requests\w*(?:{[^}]*})? (\S+)$", text, re.MULTILINE)[1])

    @contextmanager
    def one_more() -> Iterator[None]:
        before = count()
        yield
        wait_until(lambda: count() > before, "the abort")

    return one_more
