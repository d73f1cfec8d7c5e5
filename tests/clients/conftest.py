"""A real server for real clients. `--url` names one that runs already; `--record` keeps what the clients send."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from recorder import Recorder
from server_process import ServerProcess

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
def server_url(pytestconfig: pytest.Config) -> Iterator[str]:
    if pytestconfig.getoption("--url"):
        yield pytestconfig.getoption("--url")
        return
    with ServerProcess(python=PYTHON) as server:
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
    """Of the server, or of the recorder in front of it."""
    if recorder is None:
        return server_url
    recorder.client = request.module.__name__.removeprefix("check_")
    return recorder.url


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The served model's tokenizer, for clients that count or make tokens themselves."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, str(HERE / "write_tokenizer.py"), str(folder)], check=True)
    return str(folder)
