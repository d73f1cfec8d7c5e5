"""The page on security names tests that hold what it says: they are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.findall(r"\[`(test_\w+)`\]\(\.\./tests/([^)]+)\)", (ROOT / "docs" / "security.md").read_text())


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if "](../tests/" in line]
    assert len(rows) >= 30
    assert len(NAMED) >= len(rows)


def test_each_test_that_the_table_names_is_there():
    assert [(name, file) for name, file in NAMED if name not in _functions(file)] == []


@functools.cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
