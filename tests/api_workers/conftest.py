"""Fronts meet over connections in memory, and not over sockets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))

from memory_network import MemoryNetwork


@pytest.fixture(autouse=True)
def unix_sockets_in_memory(monkeypatch):
    MemoryNetwork().install(monkeypatch, is_unix_only=True)
