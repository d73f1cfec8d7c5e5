"""Run the ledgers whose guarded packages changed, and every case of sampled tests; print why each is run or left out.

    tools/ledgers.py              what changed since the commit at which all ledgers passed
    tools/ledgers.py --all        all; if they pass, tests/ledgers/passed.txt names this commit
    tools/ledgers.py --list       only print the decision

Other arguments go to pytest. A ledger names in `GUARDS` the packages of tureen it guards, or patterns of paths such as
`docs/*.md`. A file of the gate with sampled tests (tests/samples.py) guards the packages it imports. A package counts
as changed if one that it imports, directly or not, changed.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from import_rules import PACKAGE, ROOT, read_modules, room, room_graph

TESTS = ROOT / "tests"
LEDGERS = TESTS / "ledgers"
PASSED = LEDGERS / "passed.txt"
EVERYTHING = ("pyproject.toml", "constraints.txt")
"""Files that concern every ledger."""
IF_CHANGED = "--if-changed"


class Decision(NamedTuple):
    is_run: bool
    reason: str


def main(arguments: list[str]) -> int:
    is_all = "--all" in arguments
    decisions = decide(None if is_all else changed_since_pass(), read_ledgers(), room_graph(read_modules()))
    for path, decision in decisions.items():
        print(f"{'run ' if decision.is_run else 'skip'} {path.relative_to(ROOT)}: {decision.reason}", flush=True)
    chosen = [str(path.relative_to(ROOT)) for path, decision in decisions.items() if decision.is_run]
    if "--list" in arguments or not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command.append("--every-case")
    others = [argument for argument in arguments if argument != "--all"]
    status = subprocess.run([*command, *chosen, *others], cwd=ROOT).returncode
    if is_all and not status and not others:
        PASSED.write_text(_git("rev-parse", "HEAD") + "\n", encoding="utf-8")
    return status


def read_ledgers() -> dict[Path, tuple[str, ...]]:
    """Return each file of tests in tests/ledgers and its `GUARDS`, and each file of the gate that takes samples.

    Raises SystemExit if a ledger has no `GUARDS`.
    """
    found = {path: guards(path) for path in sorted(LEDGERS.rglob("test_*.py"))}
    helpers = {path.stem: path for path in TESTS.rglob("*.py")}
    for path in sorted(TESTS.rglob("test_*.py")):
        if "pytest.mark.sampled" in path.read_text(encoding="utf-8"):
            found[path] = tuple(sorted(_packages(path, helpers)))
    return found


def guards(path: Path) -> tuple[str, ...]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["GUARDS"]:
            return tuple(ast.literal_eval(statement.value))
    raise SystemExit(f"{path}: it has no GUARDS. Name the packages it guards: GUARDS = ('grammar', 'docs/*.md')")


def _packages(path: Path, helpers: Mapping[str, Path]) -> set[str]:
    """Return the packages of tureen that a file of tests and its helper modules import."""
    seen, ahead, packages = {path}, [path], set()
    while ahead:
        for name in _imports(ahead.pop()):
            if name.startswith(f"{PACKAGE}."):
                packages.add(room(name.removeprefix(f"{PACKAGE}.")))
            elif (helper := helpers.get(name)) and helper not in seen:
                seen.add(helper)
                ahead.append(helper)
    return packages


def is_to_run(tool: Path, guards: tuple[str, ...], arguments: list[str]) -> bool:
    """Decide for another tool, which runs always or, with `--if-changed`, only if what it guards changed."""
    if IF_CHANGED not in arguments:
        return True
    decision = decide(changed_since_pass(), {tool: guards}, room_graph(read_modules()))[tool]
    print(f"{'run ' if decision.is_run else 'skip'} {tool.relative_to(ROOT)}: {decision.reason}", flush=True)
    return decision.is_run


def without_choice(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != IF_CHANGED]


def changed_since_pass() -> list[str] | None:
    """Return the paths that differ from the commit at which all ledgers passed; None if it is unknown."""
    return changed_since(PASSED.read_text(encoding="utf-8").strip() if PASSED.exists() else "")


def changed_since(commit: str) -> list[str] | None:
    """Return the paths that differ from a commit, new files included; None if git does not know the commit."""
    try:
        return [
            *_git("diff", "--name-only", commit).split("\n"),
            *_git("ls-files", "-o", "--exclude-standard").split("\n"),
        ]
    except subprocess.CalledProcessError:
        return None


def decide(
    changed: list[str] | None, ledgers: Mapping[Path, tuple[str, ...]], graph: Mapping[str, set[str]]
) -> dict[Path, Decision]:
    """Decide for each ledger. changed: paths from the root, or None if they are unknown."""
    if changed is None:
        return {
            path: Decision(True, "all were asked for, or the commit of the last pass is unknown") for path in ledgers
        }
    for path in changed:
        if path in EVERYTHING:
            return {ledger: Decision(True, f"{path} changed") for ledger in ledgers}
    packages = {_package(path): path for path in changed if path.startswith(f"{PACKAGE}/")}
    return {ledger: _decide(ledger, guarded, changed, packages, graph) for ledger, guarded in ledgers.items()}


def _decide(
    ledger: Path, guarded: tuple[str, ...], changed: list[str], packages: dict[str, str], graph: Mapping[str, set[str]]
) -> Decision:
    own = {ledger.stem, *_imports(ledger)}
    for path in changed:
        if path.startswith("tests/") and Path(path).stem in own:
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


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file of tests imports by a bare name, such as helpers of tests."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
