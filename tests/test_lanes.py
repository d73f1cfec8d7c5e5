"""The gate notices what leaves its process, and ledgers run when what they guard has changed."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import costs
import lanes
import pytest
import samples

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture(scope="module")
def ledgers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        import ledgers

        yield ledgers
    for name in ("ledgers", "import_rules", "check_native", "test_busy", "test_isas"):
        sys.modules.pop(name, None)


@pytest.fixture
def acts():
    """Return a function that calls another one, and returns the acts the gate forbids."""

    def watched(call):
        with lanes.WATCH.pause():
            lanes.WATCH.begin()
            call()
            return set(lanes.WATCH.end())

    return watched


def bind():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("call", "act"),
    [
        (lambda: subprocess.run(["true"], check=True), lanes.PROCESS),
        (lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0), lanes.PROCESS),
        (lambda: os.kill(os.getpid(), signal.SIGCONT), lanes.SIGNAL),
        (bind, lanes.SOCKET),
    ],
)
def test_an_act_of_another_lane_is_noticed(acts, call, act):
    assert act in acts(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda: [end.close() for end in socket.socketpair()],
        lambda: os.kill(os.getpid(), 0),
    ],
)
def test_what_stays_in_the_process_is_no_act(acts, call):
    assert not acts(call)


def test_each_exception_names_a_test_that_is_there():
    for name in lanes.EXCEPTIONS:
        assert_is_there(lanes.TESTS, name)


@pytest.mark.parametrize("tool", ["check_native", "test_busy", "test_isas"])
def test_each_tool_names_tests_that_are_there(ledgers, tool):
    names = named_tests(importlib.import_module(tool))
    assert names
    for name in names:
        assert_is_there(ledgers.ROOT, name)


def named_tests(tool) -> set[str]:
    """All paths of tests in the tuples of a tool's module."""
    values = [value for value in vars(tool).values() if isinstance(value, tuple)]
    return {name for names in values for name in names if str(name).startswith("tests/") and "*" not in str(name)}


def assert_is_there(root: Path, name: str) -> None:
    path, _, function = name.partition("::")
    assert (root / path).exists(), name
    assert not function or f"def {function}(" in (root / path).read_text(encoding="utf-8"), name


def test_a_lane_is_a_folder():
    paths = {
        "api/test_a.py": lanes.GATE,
        "servers/browser/test_b.py": lanes.SERVERS,
        "ledgers/test_c.py": lanes.LEDGERS,
    }
    assert {path: lanes.lane(lanes.TESTS / path) for path in paths} == paths


def test_a_run_of_one_lane_keeps_the_costs_of_the_others():
    gate = costs.table({"tests/api/test_a.py::test_x": costs.Cost(2.0, 3.0)})
    servers = costs.table({"tests/servers/test_b.py::test_y": costs.Cost(1.0, 9.0, servers=2)})
    both = costs.merge(gate, servers)
    assert both["lanes"] == {"gate": [1, 2.0, 3.0], "servers": [1, 1.0, 9.0, 2]}
    assert costs.merge(both, costs.table({"tests/api/test_n.py::test_x": costs.Cost(0.1, 0.1)}))["files"] == {
        "api/test_n.py": [1, 0.1, 0.1],
        "servers/test_b.py": [1, 1.0, 9.0, 2],
    }


def test_a_run_of_ledgers_replaces_the_costs_of_its_files_alone():
    gate = costs.table({"tests/api/test_a.py::test_x": costs.Cost(2.0, 3.0)})
    first = costs.merge(gate, costs.table_of_every_case({"tests/api/test_a.py::test_x": costs.Cost(8.0, 9.0)}))
    both = costs.merge(first, costs.table_of_every_case({"tests/ledgers/test_c.py::test_x": costs.Cost(4.0, 5.0)}))
    assert both == gate | {"every case": {"api/test_a.py": [1, 8.0, 9.0], "ledgers/test_c.py": [1, 4.0, 5.0]}}
    assert costs.wall_s(both, lanes.TESTS / "api" / "test_a.py") == 3.0
    assert costs.wall_s(both, lanes.TESTS / "api" / "test_a.py", is_every_case=True) == 9.0


@pytest.mark.parametrize(
    ("folders", "options", "is_whole"),
    [
        ([], {}, True),
        ([], {"shuffle": 7}, True),
        (["tests/servers"], {}, True),
        (["tests/servers/"], {}, True),
        (["tests/servers/browser"], {}, False),
        (["tests/api"], {}, False),
        ([], {"keyword": "drain"}, False),
        (["tests/servers"], {"markexpr": "ray"}, False),
        ([], {"every_case": True}, False),
        (["tests/ledgers/api"], {"every_case": True}, False),
        (["tests/ledgers/test_docs_site.py", "tests/api/test_track.py"], {"every_case": True}, True),
        (["tests/api/test_track.py::test_x"], {"every_case": True}, False),
        (["tests/api/test_track.py"], {"every_case": True, "keyword": "drain"}, False),
    ],
)
def test_only_a_run_of_a_whole_lane_is_kept_as_its_costs(monkeypatch, folders, options, is_whole):
    monkeypatch.chdir(lanes.TESTS.parent)
    source = pytest.Config.ArgsSource.ARGS if folders else pytest.Config.ArgsSource.TESTPATHS
    config = SimpleNamespace(args_source=source, args=folders or ["tests"], getoption=options.get)
    assert costs.is_whole(config) == is_whole


GRAPH = {"grammar": {"errors"}, "engine": {"grammar"}, "http": {"errors"}, "errors": set()}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["tureen/grammar/json.py"], "it guards grammar, and tureen/grammar/json.py changed"),
        (["tureen/errors.py"], "it guards grammar, which imports errors, and tureen/errors.py changed"),
        (["docs/structured-outputs.md"], "it guards docs/*.md, and docs/structured-outputs.md changed"),
        (["tests/ledgers/test_docs_site.py"], "tests/ledgers/test_docs_site.py changed"),
        (["constraints.txt"], "constraints.txt changed"),
        (["pyproject.toml", "pyproject.toml: project.dependencies"], "pyproject.toml: project.dependencies changed"),
        (["pyproject.toml", "pyproject.toml: project.version", "pyproject.toml: tool.ruff"], None),
        (None, "all were asked for, or the commit of the last pass is unknown"),
        (["tureen/http/server.py", "tests/api/test_a.py", "README.md"], None),
        (["tureen/engine/engine.py"], None),
    ],
)
def test_a_ledger_runs_when_what_it_guards_has_changed(ledgers, changed, reason):
    path = ledgers.LEDGERS / "test_docs_site.py"
    decision = ledgers.decide(changed, {path: ("grammar", "docs/*.md")}, GRAPH)[path]
    assert decision.is_run == (reason is not None)
    assert reason is None or decision.reason == reason


METADATA = {
    'version = "': 'version = "9',
    'description = "': 'description = "More than ',
    '"Programming Language :: C++"': '"Programming Language :: C"',
    "line-length = 120": "line-length = 100",
}
SETTINGS = {
    '"numpy>=': '"numpy>=9',
    '"pillow>=11"': '"pillow>=12"',
    '"nanobind>=3': '"nanobind>=4',
    "wheel.packages": "wheel.licenses",
    "timeout = 900": "timeout = 90",
    'requires-python = ">=3.11"': 'requires-python = ">=3.12"',
    "[tool.mypy]": "[tool.new]\nkey = 1\n[tool.mypy]",
}
"""Edits of pyproject.toml."""


def test_an_edit_of_metadata_runs_no_ledger_and_one_of_dependencies_or_settings_runs_all(ledgers):
    before = (ledgers.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = {old: ledgers.changed_parts(before, before.replace(old, new, 1)) for old, new in METADATA.items()}
    assert {old for old, found in parts.items() if not found or not ledgers.UNREAD.issuperset(found)} == set()
    parts = {old: ledgers.changed_parts(before, before.replace(old, new, 1)) for old, new in SETTINGS.items()}
    assert {old for old, found in parts.items() if not found or not ledgers.UNREAD.isdisjoint(found)} == set()


def test_each_ledger_guards_packages_and_files_that_are_there(ledgers):
    packages = set(ledgers.graph())
    missing = {
        f"{path.name}: {guard}"
        for path, guards in ledgers.read_ledgers().items()
        for guard in guards
        if guard not in packages and not any(ledgers.ROOT.glob(guard))
    }
    assert missing == set()


def test_a_sample_is_spread_over_all_cases(monkeypatch):
    assert samples.some(range(41), 5) == [0, 10, 20, 30, 40]
    assert samples.some("abc", 3) == ["a", "b", "c"] == samples.some("abc", 7)
    assert samples.some("abc", 1) == ["a"]
    assert samples.either(100, 7) == 7
    monkeypatch.setattr(samples, "_is_whole", True)
    assert samples.some(range(41), 5) == [*range(41)]
    assert samples.either(100, 7) == 100


def test_a_sampled_file_of_the_gate_guards_what_it_and_its_helpers_import(ledgers):
    found = ledgers.read_ledgers()
    assert {"app", "requests", "config"} <= set(found[lanes.TESTS / "api" / "test_guarded_answers.py"])
    assert found[lanes.TESTS / "grammar" / "test_ebnf.py"] == ("grammar",)


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("tests/inline_compiler.py", "engine/test_closing_outputs.py"),  # imported by constrained_outputs
        ("tests/multi_model/conftest.py", "multi_model/test_fleet.py"),
        ("tureen/dialects/ollama/generate.py", "api/test_guarded_answers.py"),  # no import leads there
    ],
)
def test_a_sampled_file_runs_when_what_it_reaches_has_changed(ledgers, changed, test):
    path = lanes.TESTS / test
    decision = ledgers.decide([changed], {path: tuple(ledgers.reach(path).packages)}, ledgers.graph())[path]
    assert decision.is_run
    assert changed in decision.reason


@pytest.mark.parametrize("tool", ["check_native", "test_isas"])
def test_a_tool_that_may_be_left_out_guards_itself_and_the_tests_it_runs(ledgers, capsys, monkeypatch, tool):
    guards = importlib.import_module(tool).GUARDS
    path = ledgers.ROOT / "tools" / f"{tool}.py"
    for changed in (f"tools/{tool}.py", "tureen/kernels/cpu/src/pool.cpp", "tests/kernels/test_linear.py"):
        monkeypatch.setattr(ledgers, "changed_since_pass", lambda changed=changed: [changed])
        assert ledgers.is_to_run(path, guards, ["--if-changed"]), changed
    monkeypatch.setattr(ledgers, "changed_since_pass", lambda: ["README.md"])
    assert not ledgers.is_to_run(path, guards, ["--if-changed"])
    assert ledgers.is_to_run(path, guards, [])
    assert all(guard in ledgers.graph() or any(ledgers.ROOT.glob(guard)) for guard in guards)


def test_no_file_of_tests_imports_from_another(ledgers):
    tests = {path.stem for path in lanes.TESTS.rglob("test_*.py")}
    imports = {
        f"{path.relative_to(lanes.TESTS)} imports {name}: move what both need to a helper module"
        for path in lanes.TESTS.rglob("*.py")
        for name in ledgers._imports(path)
        if name in tests
    }
    assert imports == set()
