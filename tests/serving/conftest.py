"""The virtual clock of the simulation, and engines that run on it as if in processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

from simulated_processes import Processes


@pytest.fixture
def processes(monkeypatch):
    """No test that has this starts a process or opens a socket: what would, is simulated."""
    made = Processes()
    made.install(monkeypatch)
    return made
