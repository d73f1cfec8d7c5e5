"""Changes one operator or constant at a time and sees whether the tests notice: `make mutants ARGS=quotas`. Slow.

Each mutant is written into a copy of the tree, so that nothing here changes.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coverage_table import PARTS

GOAL = 90.0
NUM_MUTANTS = 30
"""Of each part, drawn with the same seed every time."""

TIMEOUT_S = 300
HOME = Path(__file__).parent.parent

RUN = """
import sys
home, copy, *args = sys.argv[1:]
for finder in sys.meta_path:  # an editable installation finds the modules where they were, not in the copy
    for name, path in getattr(finder, "known_source_files", {}).items():
        finder.known_source_files[name] = path.replace(home, copy)
    for paths in getattr(finder, "submodule_search_locations", {}).values():
        paths[:] = [path if "site-packages" in path else path.replace(home, copy) for path in paths]
import tureen.config
assert tureen.config.__file__.startswith(copy)
import pytest
sys.exit(pytest.main(args))
"""
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """What can be changed: a node, its field, an index in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, "ops", 0
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
            yield node, "op", None
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield node, "value", None


def mutate(text: str, number: int) -> tuple[str, int]:
    """The source with one change, and its line."""
    tree = ast.parse(text)
    node, field, index = list(places(tree))[number]
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
    elif index is None:
        setattr(node, field, SWAPS[type(getattr(node, field))]())
    else:
        getattr(node, field)[index] = SWAPS[type(getattr(node, field)[index])]()
    return ast.unparse(tree), getattr(node, "lineno", 0)


def passes(folder: Path, tests: list[str]) -> bool:
    """Whether the tests of a part find nothing."""
    command = [sys.executable, "-c", RUN, str(HOME), str(folder), "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def try_part(folder: Path, name: str) -> tuple[int, int]:
    """How many of a part's mutants were killed, and tried."""
    files, tests = PARTS[name]
    found = [one for one in tests if (folder / one).exists()]
    sources = {one: (folder / "tureen" / one).read_text() for one in files}
    every = [(one, at) for one, text in sources.items() for at in range(len(list(places(ast.parse(text)))))]
    chosen = random.Random(name).sample(every, min(NUM_MUTANTS, len(every)))
    killed = 0
    for one, at in chosen:
        text, line = mutate(sources[one], at)
        (folder / "tureen" / one).write_text(text)
        survived = passes(folder, found)
        (folder / "tureen" / one).write_text(sources[one])
        killed += not survived
        if survived:
            print(f"    survived: tureen/{one}:{line}", flush=True)
    return killed, len(chosen)


def main(names: list[str]) -> int:
    """Prints killed / tried of each part. Exit status 1 where all together are below the goal."""
    totals = [0, 0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tree")
        shutil.copytree(HOME, folder, ignore=shutil.ignore_patterns(".*", "build"))
        for name in names or PARTS:
            if not passes(folder, [one for one in PARTS[name][1] if (folder / one).exists()]):
                print(f"{name:14} its tests fail without any change", flush=True)
                return 1
            killed, tried = try_part(folder, name)
            totals = [totals[0] + killed, totals[1] + tried]
            print(f"{name:14} {killed} / {tried}", flush=True)
    print(f"{'all':14} {totals[0]} / {totals[1]}")
    return int(100 * totals[0] < GOAL * totals[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
