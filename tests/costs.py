"""The processor and wall seconds of each test, child processes included, in one committed file.

`costs.json` begins the longest files first and holds the total of the gate, which may only fall (tools/ratchets.json).
A run of a whole lane, as CI makes it, keeps its figures in build/test-costs.json; so does a run of ledgers, for each of
its files. `make costs` puts these into `costs.json`; a file that is not in there yet counts as long.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lanes import SERVERS, TESTS, lane

COMMITTED = TESTS / "costs.json"
LATEST = TESTS.parent / "build" / "test-costs.json"
SLOW_S = 1.0
"""A test that takes longer is listed by itself."""


STARTED: list[str] = []
"""The command of each real server that this process started."""


class Cost(NamedTuple):
    """Seconds of processor time, seconds of wall time, and the number of real servers that were started."""

    cpu_s: float
    wall_s: float
    servers: int = 0

    def __add__(self, other: Any) -> Cost:
        return Cost(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(mine - its for mine, its in zip(self, other, strict=True)))


NOTHING = Cost(0.0, 0.0)


def now() -> Cost:
    """Read the clocks of this process. Children count when they have ended and were waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Cost(sum(usage.ru_utime + usage.ru_stime for usage in usages), time.perf_counter(), len(STARTED))


def table(costs: dict[str, Cost]) -> dict[str, Any]:
    """Sum the costs of tests, by their ids: for each lane and each file [cases, processor seconds, wall seconds],
    and the number of servers if they started some."""
    lanes: dict[str, list[Cost]] = {}
    files: dict[str, list[Cost]] = {}
    for name, cost in costs.items():
        path = name.partition("::")[0].removeprefix("tests/")
        files.setdefault(path, []).append(cost)
        lanes.setdefault(lane(TESTS / path), []).append(cost)
    slow = {name: cost for name, cost in costs.items() if max(cost[:2]) >= SLOW_S}
    return {
        "lanes": {name: _sums(found) for name, found in sorted(lanes.items())},
        "files": {name: _sums(found) for name, found in sorted(files.items())},
        "slow tests": {
            name.removeprefix("tests/"): [round(part, 1) for part in slow[name][:2]] for name in sorted(slow)
        },
        "every case": {},
    }


def table_of_every_case(costs: dict[str, Cost]) -> dict[str, Any]:
    """Sum the costs of a run of ledgers. Files of the gate are among its files, with all their cases."""
    return {**table({}), "every case": table(costs)["files"]}


def _sums(costs: list[Cost]) -> list[float]:
    total = sum(costs, NOTHING)
    servers = [total.servers] if total.servers else []
    return [len(costs), round(total.cpu_s, 1), round(total.wall_s, 1), *servers]


def read(path: Path = COMMITTED) -> dict[str, Any]:
    return table({}) | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def wall_s(known: dict[str, Any], path: Path, is_every_case: bool = False) -> float:
    """Return the wall seconds that a file took; a new file counts as long."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    files = known["every case" if is_every_case else "files"]
    return float(files.get(name, [0, 0.0, SLOW_S])[2])


def merge(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Replace the lanes that were run, each as a whole, and the files of ledgers that were run."""
    ran = set(new["lanes"])

    def kept(part: str) -> dict[str, Any]:
        return {name: cost for name, cost in known[part].items() if lane(TESTS / name.partition("::")[0]) not in ran}

    lanes = {name: cost for name, cost in known["lanes"].items() if name not in ran}
    return {
        "lanes": dict(sorted({**lanes, **new["lanes"]}.items())),
        **{part: dict(sorted({**kept(part), **new[part]}.items())) for part in ("files", "slow tests")},
        "every case": dict(sorted({**known["every case"], **new["every case"]}.items())),
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """Write one line for each entry, so that a change of one test is a change of one line."""
    parts = []
    for title, entries in data.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in entries.items()]
        parts.append(f" {json.dumps(title)}: {{\n" + ",\n".join(lines) + "\n }")
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


PROPERTY = "cost"
BEGAN = pytest.StashKey[Cost]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((PROPERTY, list(now() - item.stash[BEGAN])))  # what workers can send
    return report


def is_whole(config: pytest.Config) -> bool:
    """Return whether a run has all tests of the gate, of the servers, or every case of its files."""
    narrowed = ("keyword", "markexpr", "deselect", "lf", "collectonly", "maxfail")
    if any(config.getoption(name, None) for name in narrowed):
        return False
    if config.getoption("every_case", None):
        return all(Path(arg).suffix == ".py" for arg in config.args)
    is_servers = [Path(arg).resolve() for arg in config.args] == [TESTS / SERVERS]
    return is_servers or config.args_source == pytest.Config.ArgsSource.TESTPATHS


class Collector:
    """Collects the costs of all processes of a run, and writes them at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._costs: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._costs[report.nodeid] = self._costs.get(report.nodeid, NOTHING) + Cost(*value)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if is_whole(self._config) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sums = table_of_every_case if self._config.getoption("every_case") else table
            write(LATEST, merge(read(LATEST), sums(self._costs)))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        found, known = table(self._costs), read()["every case" if self._config.getoption("every_case") else "files"]
        for name, (cases, cpu_s, wall_s, *servers) in found["lanes"].items():
            started = "".join(f", {number} servers started" for number in servers)
            terminalreporter.write_line(
                f"{name}: {cases} cases, {cpu_s} s of processor time, {wall_s} s in all workers{started}"
            )
        new = found["files"].keys() - known.keys()
        if new and is_whole(self._config):
            terminalreporter.write_line(f"tests/costs.json does not know {len(new)} of these files yet: make costs")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(config))


if __name__ == "__main__":
    latest = read(LATEST)
    if not (latest["lanes"] or latest["every case"]):
        sys.exit("build/test-costs.json has no figures; run: make test test-servers test-ledgers")
    write(COMMITTED, merge(read(), latest))
    print(
        *(
            f"{name}: {cases} cases, {cpu_s} s of processor time"
            for name, (cases, cpu_s, *_) in latest["lanes"].items()
        ),
        sep="\n",
    )
