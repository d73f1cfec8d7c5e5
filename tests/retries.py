"""Flakes: tests of real servers that fail, and pass when they are run again.

`make test-servers` runs a failed test once more. This plugin names the tests that passed then. `flakes.py` lists the
known ones; its number may only fall (tools/ratchets.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from flakes import KNOWN


class Collector:
    def __init__(self) -> None:
        self._failed: dict[str, str] = {}
        self._flaked: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self._failed[report.nodeid] = report.longreprtext
        elif report.when == "call" and report.passed and report.nodeid in self._failed:
            self._flaked.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name in self._flaked:
            terminalreporter.section(f"flake: {name}")
            terminalreporter.write_line(self._failed[name])
            known = KNOWN.get(name.removeprefix("tests/"))
            terminalreporter.write_line(f"known: {known}" if known else "It is not in tests/flakes.py. Find its cause.")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector())
