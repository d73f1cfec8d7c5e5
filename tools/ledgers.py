"""Run the ledgers and the sampled tests whose guarded packages changed, and print the reason for each decision.

    tools/ledgers.py              what changed since the commit at which all ledgers passed
    tools/ledgers.py --all        all
    tools/ledgers.py --passed     if they pass, tests/ledgers/passed.txt names this commit (make test-all does so)
    tools/ledgers.py --list       only print the decision

Other arguments go to pytest. A ledger names in `GUARDS` the packages of tureen it guards, or patterns of paths such as
`docs/*.md`. A file of the gate with sampled tests (tests/samples.py) guards the packages it imports. A package counts
as changed if one that it imports, directly or not, changed. All run if dependencies or settings changed.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from import_rules import PACKAGE, ROOT, read_modules, room, room_graph

TESTS = ROOT / "tests"
LEDGERS = TESTS / "ledgers"
PASSED = LEDGERS / "passed.txt"
PYPROJECT = "pyproject.toml"
EVERYTHING = ("constraints.txt",)
"""Files that concern every ledger, as most parts of pyproject.toml do."""
UNREAD = frozenset(
    f"{PYPROJECT}: {part}"
    for part in (
        *(f"project.{key}" for key in ("version", "description", "readme", "license", "license-files", "classifiers")),
        *(f"project.{key}" for key in ("authors", "maintainers", "keywords", "urls")),
        "tool.ruff",
        "tool.mypy",
    )
)
"""Parts of pyproject.toml that no ledger depends on: metadata of the package, settings of linters."""
IF_CHANGED = "--if-changed"
TWO_PROCESSES = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
HARNESS = frozenset({"samples", "lanes"})
"""Helpers that select tests. No test depends on their imports."""
PLUG_INS = {"app": {"dialects"}}
"""Packages that a package finds by name, without an import."""


class Decision(NamedTuple):
    is_run: bool
    reason: str


class Reach(NamedTuple):
    """The files of tests that a test uses, itself among them, and the packages of tureen that they import."""

    files: frozenset[str]  # from the root
    packages: frozenset[str]


def main(arguments: list[str]) -> int:
    is_all = "--all" in arguments
    changed = None if is_all else changed_since_pass()
    decisions = decide(changed, read_ledgers(), graph())
    for part in UNREAD.intersection(changed or ()):
        print(f"     {part} changed, which no ledger reads", flush=True)
    for path, decision in decisions.items():
        print(f"{'run ' if decision.is_run else 'skip'} {path.relative_to(ROOT)}: {decision.reason}", flush=True)
    chosen = [str(path.relative_to(ROOT)) for path, decision in decisions.items() if decision.is_run]
    if "--list" in arguments or not chosen:
        return 0
    others = [argument for argument in arguments if argument not in ("--all", "--passed")]
    command = [sys.executable, "-m", "pytest", *TWO_PROCESSES, "--every-case", *chosen, *others]
    status = subprocess.run(command, cwd=ROOT).returncode
    if "--passed" in arguments and not status and not others:
        PASSED.write_text(_git("rev-parse", "HEAD") + "\n", encoding="utf-8")
    return status


def read_ledgers() -> dict[Path, tuple[str, ...]]:
    """Return each file of tests in tests/ledgers and its `GUARDS`, and each file of the gate that takes samples.

    Raises SystemExit if a ledger has no `GUARDS`.
    """
    found = {path: guards(path) for path in sorted(LEDGERS.rglob("test_*.py"))}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "pytest.mark.sampled" in path.read_text(encoding="utf-8"):
            found[path] = tuple(sorted(reach(path).packages))
    return found


def guards(path: Path) -> tuple[str, ...]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["GUARDS"]:
            return tuple(ast.literal_eval(statement.value))
    raise SystemExit(f"{path}: it has no GUARDS. Name the packages it guards: GUARDS = ('grammar', 'docs/*.md')")


def reach(path: Path) -> Reach:
    """Follow the imports of a file of tests, and of each `conftest.py` of its folder and the folders around it."""
    folders = [folder for folder in path.parents if folder.is_relative_to(TESTS) and folder != TESTS]
    ahead = [path, *(found for folder in folders if (found := folder / "conftest.py").exists())]
    seen, packages = set(ahead), set()
    while ahead:
        for name in _imports(ahead.pop()):
            if name.startswith(f"{PACKAGE}."):
                packages.add(room(name.removeprefix(f"{PACKAGE}.")))
            elif name not in HARNESS and (helper := _helpers().get(name)) and helper not in seen:
                seen.add(helper)
                ahead.append(helper)
    return Reach(frozenset(file.relative_to(ROOT).as_posix() for file in seen), frozenset(packages))


@functools.cache
def _helpers() -> dict[str, Path]:
    return {path.stem: path for path in TESTS.rglob("*.py") if path.stem != "conftest"}


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return the packages that each package imports, or finds by name."""
    imported = room_graph(read_modules())
    return {package: others | PLUG_INS.get(package, set()) for package, others in imported.items()}


def is_to_run(tool: Path, guards: tuple[str, ...], arguments: list[str]) -> bool:
    """Decide for another tool, which runs always or, with `--if-changed`, only if it or what it guards changed."""
    if IF_CHANGED not in arguments:
        return True
    name = tool.relative_to(ROOT).as_posix()
    decision = decide(changed_since_pass(), {tool: (name, *guards)}, graph())[tool]
    print(f"{'run ' if decision.is_run else 'skip'} {name}: {decision.reason}", flush=True)
    return decision.is_run


def without_choice(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != IF_CHANGED]


def changed_since_pass() -> list[str] | None:
    """Return the paths that differ from the commit at which all ledgers passed; None if it is unknown."""
    return changed_since(PASSED.read_text(encoding="utf-8").strip() if PASSED.exists() else "")


def changed_since(commit: str) -> list[str] | None:
    """Return the paths that differ from a commit, new files included; None if git does not know the commit.

    After the path of pyproject.toml come its parts that differ, such as `pyproject.toml: project.dependencies`.
    """
    try:
        paths = _git("diff", "--name-only", commit).split("\n")
        if PYPROJECT in paths:
            paths += changed_parts(_git("show", f"{commit}:{PYPROJECT}"), (ROOT / PYPROJECT).read_text("utf-8"))
        return [*paths, *_git("ls-files", "-o", "--exclude-standard").split("\n")]
    except subprocess.CalledProcessError:
        return None


def changed_parts(before: str, after: str) -> list[str]:
    """Return the parts in which two versions of pyproject.toml differ."""
    old, new = (dict(_parts(tomllib.loads(text))) for text in (before, after))
    return [f"{PYPROJECT}: {part}" for part in sorted(old.keys() | new.keys()) if old.get(part) != new.get(part)]


def _parts(project: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name the keys of `project` and the tools one by one, and other tables as a whole."""
    for table, content in project.items():
        if table in ("project", "tool"):
            yield from ((f"{table}.{key}", value) for key, value in content.items())
        else:
            yield table, content


def decide(
    changed: list[str] | None, ledgers: Mapping[Path, tuple[str, ...]], graph: Mapping[str, set[str]]
) -> dict[Path, Decision]:
    """Decide for each ledger. changed: what `changed_since` returns."""
    if changed is None:
        return {
            path: Decision(True, "all were asked for, or the commit of the last pass is unknown") for path in ledgers
        }
    for path in changed:
        if path in EVERYTHING or (path.startswith(f"{PYPROJECT}: ") and path not in UNREAD):
            return {ledger: Decision(True, f"{path} changed") for ledger in ledgers}
    packages = {_package(path): path for path in changed if path.startswith(f"{PACKAGE}/")}
    return {ledger: _decide(ledger, guarded, changed, packages, graph) for ledger, guarded in ledgers.items()}


def _decide(
    ledger: Path, guarded: tuple[str, ...], changed: list[str], packages: dict[str, str], graph: Mapping[str, set[str]]
) -> Decision:
    own = reach(ledger).files
    for path in changed:
        if path in own:
            return Decision(True, f"{path} changed")
        for guard in guarded:
            if fnmatch.fnmatch(path, guard):
                return Decision(True, f"it guards {guard}, and {path} changed")
    for guard in guarded:
        for package in sorted(_reached(guard, graph) & packages.keys()):
            way = guard if guard == package else f"{guard}, which imports {package}"
            return Decision(True, f"it guards {way}, and {packages[package]} changed")
    return Decision(False, f"nothing changed in {', '.join(guarded)} or in what they import")


def _package(path: str) -> str:
    """Return the package, or the module beside the packages, of a file in tureen."""
    return room(path.removeprefix(f"{PACKAGE}/").removesuffix(".py").replace("/", "."))


def _reached(package: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen, ahead = {package}, [package]
    while ahead:
        new = graph.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Return the names of the modules that a file of tests imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return frozenset(found)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
