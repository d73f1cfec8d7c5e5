"""One real server with the real model for the whole module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import ServerProcess


@pytest.fixture(scope="session")
def server(default_model_source) -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running.wait_ready()
